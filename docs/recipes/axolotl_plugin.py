"""LongCE in Axolotl: `plugins: [axolotl_plugin.LongCEPlugin]` in the YAML, with this file in the folder of the run."""

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

import longce


class LongCEArguments(BaseModel):
    """Keys of the YAML."""

    longce_context_length: int = 4096
    longce_stride: int = 1024
    longce_gamma: float = 5.0


class LongCEPlugin(BasePlugin):
    """Gives the model its loss when it has been loaded, with adapters if there are any."""

    def get_input_args(self):
        return "axolotl_plugin.LongCEArguments"

    def post_model_load(self, cfg, model):
        longce.apply_longce(
            model,
            context_length=cfg.longce_context_length,
            stride=cfg.longce_stride,
            objective=longce.LongCE(gamma=cfg.longce_gamma),
        )

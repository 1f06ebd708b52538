from tests.lightning_modules.tasks.evaluation.conftest import guessing_dir, prompter  # noqa: F401
from tests.lightning_modules.tasks.harness.conftest import task_dir  # noqa: F401

"""Experiments on tiny models, as the mappings of their config files."""

LENGTHS = {"context_length": 32, "stride": 16}
ON_CPU = {
    "accelerator": "cpu",
    "devices": 1,
    "precision": "32-true",
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def component(name, /, **arguments):
    """An object by its class."""
    return {"class_path": name, "init_args": arguments}


def text_data(model, path, **settings):
    """Texts of a file, for training and validation."""
    settings = {"tokenizer": str(model), "train": str(path), "validation": str(path), **settings}
    return component("datamodules.TextDataModule", **settings)


def book_data(model, path, **settings):
    """Books in the layout of PG-19."""
    settings = {"path": str(path), "tokenizer": str(model), "sequence_length": 128, **settings}
    return component("datamodules.PG19DataModule", **settings)


def evaluator(folder, **settings):
    """The callback that measures LongPPL, with thresholds at which random models find key tokens."""
    settings = {"evaluator": str(folder), **LENGTHS, "alpha": 0.5, "beta": -6.0, **settings}
    return component("callbacks.ExternalEvaluator", **settings)


def tensorboard(**settings):
    return component("lightning.pytorch.loggers.TensorBoardLogger", save_dir="runs", **settings)


def experiment(model, data, *, lr=None, **trainer):
    """A config of a short training on the CPU; ``model`` is a folder."""
    settings = {"pretrained_model_name_or_path": str(model), **LENGTHS}
    if lr is not None:
        settings["optimizer"] = component("torch.optim.AdamW", lr=lr)
    return {"model": settings, "data": data, "trainer": {**ON_CPU, **trainer}}

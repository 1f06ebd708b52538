from tests.lightning_modules.tasks.harness.conftest import task_dir  # noqa: F401

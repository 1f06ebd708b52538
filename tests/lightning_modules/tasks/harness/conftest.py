import pytest

from tests.support.harness_tasks import write_tasks


@pytest.fixture(scope="session")
def task_dir(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(autouse=True, scope="session")
def _datasets_elsewhere(tmp_path_factory):
    """What `datasets` makes of the questions stays out of the user's cache."""
    patch = pytest.MonkeyPatch()
    patch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
    yield
    patch.undo()

import pytest

from tests.support.harness_tasks import write_tasks


@pytest.fixture(scope="session")
def task_dir(tmp_path_factory):
    """Files of tasks; what `datasets` makes of their questions stays out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        yield write_tasks(tmp_path_factory.mktemp("tasks"))

import json

import datasets
import pytest

from datamodules.gov_report import GovReportDataModule


@pytest.mark.parametrize("field", ["input", "report", "text"])
def test_one_file_is_used_for_validation_and_test(word_tokenizer, tmp_path, field):
    records = [{"id": "crs_1", "title": "Grants", field: "a b c"}, {field: "d", "output": "e"}]
    (tmp_path / "reports.jsonl").write_text("\n".join(map(json.dumps, records)))
    module = GovReportDataModule(word_tokenizer, path=str(tmp_path / "reports.jsonl"), validation_length=2)
    module.prepare_data()
    for stage, loader in (("validate", module.val_dataloader), ("test", module.test_dataloader)):
        module.setup(stage)
        batches = list(loader())
        assert [batch["names"][0] for batch in batches] == ["crs_1 Grants", "reports.jsonl:2"]
        assert [batch["text"][0] for batch in batches] == ["a b", "d"]


def test_a_folder_has_a_file_for_each_split(word_tokenizer, tmp_path):
    for split in ("validation", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"report": f"a {split}"}))
    module = GovReportDataModule(word_tokenizer, path=str(tmp_path))
    assert [document.text for document in module.source("validation")] == ["a validation"]
    assert [document.text for document in module.source("test")] == ["a test"]


def test_parquet_column_of_the_hub(word_tokenizer, tmp_path):
    rows = [{"report": "a b", "summary": "c"}]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "test-00000-of-00001.parquet")
    module = GovReportDataModule(word_tokenizer, path=str(tmp_path))
    assert [document.text for document in module.source("test")] == ["a b"]
    module = GovReportDataModule(word_tokenizer, path=str(tmp_path), text_column="summary")
    assert [document.text for document in module.source("test")] == ["c"]


def test_there_is_nothing_to_train_on(word_tokenizer, tmp_path):
    (tmp_path / "reports.jsonl").write_text('{"text": "a"}')
    module = GovReportDataModule(word_tokenizer, path=str(tmp_path / "reports.jsonl"))
    module.prepare_data()
    module.setup("fit")
    with pytest.raises(ValueError, match="GovReportDataModule has no training rows: it only evaluates"):
        module.train_dataloader()

import pytest

from benchmarks.reproduction.miniature.recall_corpus import RecallCorpus
from benchmarks.reproduction.miniature.settings import CONFIG, read_settings


def test_the_name_of_earlier_configs_is_read_with_a_warning(tmp_path):
    path = tmp_path / "config.yaml"
    new = "benchmarks.reproduction.miniature.recall_corpus.RecallCorpus"
    path.write_text(CONFIG.read_text().replace(new, "datamodules.recall.RecallCorpus"))
    with pytest.warns(FutureWarning, match=f"is now {new}"):
        assert isinstance(read_settings(path).load_corpus(), RecallCorpus)


def test_the_corpus_of_experiments(tmp_path):
    corpus = RecallCorpus()
    tokenizer = corpus.tokenizer()
    (document,) = corpus.documents(1, 100)
    assert len(tokenizer(document.text).input_ids) == 100
    by_depth = corpus.questions(11, 300, depths=4, behind=128)
    assert [len(part) for part in by_depth] == [2, 3, 3, 3]
    for part in by_depth:
        for question in part:
            assert len(tokenizer(question.text).input_ids) == 300
            assert question.words[-1].distance > 128
    data = corpus.training_data(
        7,
        sequence_length=40,
        document_rows=2,
        slot=5,
        second_dialect=0.5,
        batch_size=2,
        seed=1,
        cache_dir=str(tmp_path),
    )
    data.setup("fit")
    assert [len(data.rows), data.rows.rows.sequence_length] == [8, 40]
    assert corpus.fingerprint() == RecallCorpus().fingerprint()

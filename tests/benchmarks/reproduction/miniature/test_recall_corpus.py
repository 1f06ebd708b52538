from benchmarks.reproduction.miniature.recall_corpus import RecallCorpus


def test_the_corpus_of_experiments(tmp_path):
    corpus = RecallCorpus()
    tokenizer = corpus.tokenizer()
    (document,) = corpus.documents(1, 100)
    assert len(tokenizer(document.text).input_ids) == 100
    by_depth = corpus.questions(11, 300, depths=4, distance=128)
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

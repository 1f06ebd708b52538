"""Score documents in a pipeline of datatrove: python datatrove_step.py."""

import pyarrow
from datatrove.executor import LocalPipelineExecutor  # or SlurmPipelineExecutor
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.readers import ParquetReader
from datatrove.pipeline.writers import ParquetWriter

from longce import LongContextScorer


class LongRangeScores(PipelineStep):
    name = "long-range scores"
    type = "scorer"

    def __init__(self, scorer):
        super().__init__()
        self.scorer = scorer

    def run(self, data, rank=0, world_size=1):
        for document in data:
            (scores,) = self.scorer([{"text": document.text}])
            document.metadata |= scores
            yield document


if __name__ == "__main__":
    # The model is loaded in the tasks, not here.
    scorer = LongContextScorer("meta-llama/Llama-3.2-1B", context_length=4096, max_tokens=131072)
    # Without a schema, a column that is null in a task's first rows would have another type.
    # It names all columns to write: add those of the corpus that you want to keep.
    schema = pyarrow.schema([("id", pyarrow.string()), ("text", pyarrow.string()), *scorer.schema])
    writer = ParquetWriter("scores", expand_metadata=True, schema=schema)
    LocalPipelineExecutor([ParquetReader("corpus"), LongRangeScores(scorer), writer], tasks=64, workers=1).run()

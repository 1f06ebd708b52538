"""Score parquet files on a Ray cluster: python ray_data.py."""

import ray

from longce import LongContextScorer

scores = ray.data.read_parquet("corpus").map_batches(
    LongContextScorer,
    fn_constructor_args=("meta-llama/Llama-3.2-1B",),
    fn_constructor_kwargs={"context_length": 4096, "max_tokens": 131072},
    batch_format="pyarrow",  # keeps the type of a column that is null in a whole batch
    batch_size=16,
    num_gpus=1,
    concurrency=(1, 64),  # one copy of the model per GPU
)
scores.write_parquet("scores")

#!/usr/bin/env bash
# From raw files to a trained model: score the documents, write a page, select by three conditions, train.
# MODEL=mistralai/Mistral-7B-v0.1 FILES='raw/*.jsonl' OUT=runs/curated configs/curate.sh
# The documents need a field `source`. Options of the commands: SCORE, SELECT and TRAIN, as words.
set -euo pipefail
configs=$(dirname "$0")
: "${MODEL:?set the model, a hub id or local folder}" "${FILES:?set the files of the corpus}"
OUT=${OUT:-runs/curated}
WHERE=${WHERE:-"key_token_ratio > 0.01 and benefit_mean > 0 and tokens between 8192 and 131072"}
mkdir -p "$OUT"

# 1. One row of numbers per document, and the page $OUT/scores/_report.html. The same command resumes.
longce predict -c "$configs/base.yaml" -c "$configs/score_corpus.yaml" --model.pretrained_model_name_or_path "$MODEL" \
  --data.files "$FILES" --data.columns '[source]' --trainer.callbacks.output_dir "$OUT/scores" ${SCORE:-}

# 2. Documents that meet three conditions, each text once, as a mixture of their sources.
longce select "$OUT/scores" --by source --where "$WHERE" --unique true --output "$OUT/chosen.parquet" \
  --mixture "$OUT/mixture.yaml" --page "$OUT/chosen.html" ${SELECT:-}

# 3. LongCE on the mixture, 20 steps.
longce fit -c "$configs/base.yaml" -c "$OUT/mixture.yaml" --model.pretrained_model_name_or_path "$MODEL" \
  --data.tokenizer "$MODEL" --data.sequence_length 8192 --trainer.max_steps 20 ${TRAIN:-}

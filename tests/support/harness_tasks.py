"""Tasks of lm-evaluation-harness that need no network: four kinds of questions about made-up text, and a group."""

import json
import random

from tests.conftest import make_text

TASKS = {
    "choice": """
task: choice
dataset_path: json
dataset_kwargs: {data_files: {test: QUESTIONS}}
test_split: test
fewshot_split: test
output_type: multiple_choice
doc_to_text: "{{text}}\\nWord:"
doc_to_choice: "{{choices}}"
doc_to_target: answer
num_fewshot: 1
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
metadata: {version: 1.0}
""",
    "letter": """
task: letter
dataset_path: json
dataset_kwargs: {data_files: {test: QUESTIONS}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}\\nA, B or C:"
doc_to_choice: ["A", "B", "C"]
doc_to_target: answer
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
metadata: {version: 1.0}
""",
    "answer": """
task: answer
dataset_path: json
dataset_kwargs: {data_files: {test: QUESTIONS}}
test_split: test
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: [a, "."], max_gen_toks: 12, do_sample: false}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
metadata: {version: 1.0}
""",
    "rolling": """
task: rolling
dataset_path: json
dataset_kwargs: {data_files: {test: QUESTIONS}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - {metric: word_perplexity}
  - {metric: bits_per_byte}
metadata: {version: 1.0}
""",
    "both": """
group: both
task: [choice, letter]
aggregate_metric_list:
  - {metric: acc, weight_by_size: false}
metadata: {version: 1.0}
""",
    "away": """
task: away
dataset_path: nobody/has-this
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: ["A", "B"]
doc_to_target: answer
""",
}


def write_tasks(folder, questions=7, words=30):
    """Write the tasks and their questions, of which some are much longer than others."""
    generator = random.Random(0)
    lines = []
    for number in range(questions):
        text = make_text(words * generator.randint(1, 4), seed=number)
        choices = [make_text(generator.randint(1, 3), seed=100 + 3 * number + choice) for choice in range(3)]
        lines.append(json.dumps({"text": text, "choices": choices, "answer": number % 3}))
    questions = folder / "questions.jsonl"
    questions.write_text("\n".join(lines) + "\n")
    for name, content in TASKS.items():
        (folder / f"{name}.yaml").write_text(content.replace("QUESTIONS", str(questions)))
    return folder

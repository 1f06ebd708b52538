"""Each feature of README.md has a quick test that runs its command from end to end."""

import ast

import pytest

from tests.docs.test_docs import ROOT

README = "tests/docs/test_readme.py::test_command"
COMMANDS = "tests/lightning_modules/commands"
FEATURES = {
    "train with LongCE": README,
    "train with adapters": README,
    "train in shards (FSDP2)": README,
    "measure LongPPL": README,
    "see key tokens": README,
    "see key tokens in a browser": "tests/lightning_modules/visualization/page/test_browser.py::"
    "test_the_document_is_shown_and_nothing_of_it_is_run",
    "score a corpus, and select from it": README,
    "evaluate on long-context tasks": README,
    "evaluate on tasks of lm-evaluation-harness": "tests/lightning_modules/tasks/harness/test_command.py::"
    "test_tasks_with_a_result_are_not_asked_again",
    "compare runs": f"{COMMANDS}/compare/test_compare.py::test_runs_are_ranked_with_what_differs_and_costs",
    "correlate perplexities with scores": README,
    "export a model": README,
    "look at training sequences": README,
    "estimate time and memory": README,
    "launch two processes": f"{COMMANDS}/test_launch.py::test_two_processes_train_one_model_and_log_once",
    "precompute token weights": f"{COMMANDS}/test_influence.py::"
    "test_weights_by_the_model_itself_are_those_of_longce_at_step_0",
    "use a model on a server": "tests/lightning_modules/scoring/test_served.py::"
    "test_score_with_an_evaluator_and_a_model_on_servers",
    "quickstart": f"{COMMANDS}/test_quickstart.py::test_each_run_is_a_line_and_the_log_has_the_commands",
    "reproduce a table of the paper": "tests/benchmarks/reproduction/tables/test_command.py::"
    "test_numbers_are_those_of_longce_score",
}


@pytest.mark.parametrize("feature", FEATURES)
def test_has_a_quick_test(feature):
    path, _, name = FEATURES[feature].partition("::")
    tests = {node.name: node for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)}
    assert not [mark for mark in map(ast.unparse, tests[name].decorator_list) if mark.startswith("pytest.mark.slow")]

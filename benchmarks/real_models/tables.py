"""Tables of the studies for `benchmarks/RESULTS.md`, from their raw numbers."""

from collections.abc import Sequence
from typing import Any

Table = dict[str, Any]


def tabulate_anatomy(numbers: dict[str, Any]) -> list[Table]:
    """Return the shares of key tokens and of all tokens, and how far evaluators and settings agree."""
    head = ["evaluator", "tokens", "key tokens"]
    first = next(iter(numbers["evaluators"].values()))
    head += [*first["kinds"], *first["history"]]
    rows = []
    for name, found in numbers["evaluators"].items():
        shares = found["kinds"] | found["history"]
        cells = [f"{_percent(each['key'], each['interval'])}; all {100 * each['all']:.1f}" for each in shares.values()]
        rows.append([name, f"{found['tokens']:,}", f"{found['key_tokens']:,}", *cells])
    agreement = [["both evaluators", f"{len(numbers['agreement']['documents'])}", _mean(numbers["agreement"])]]
    agreement += [[name, f"{len(each['documents'])}", _mean(each)] for name, each in numbers["stability"].items()]
    counter = [
        [name, f"{n}", f"{each['recall']:.3f}", f"{each['precision']:.3f}"]
        for name, found in numbers["evaluators"].items()
        for n, each in found["counter"].items()
    ]
    return [
        {"text": "Shares of the key tokens in percent, with 95% intervals over documents, and of all tokens:"},
        {"head": head, "rows": rows},
        {"text": "Jaccard index of the key characters (mean over documents, 95% interval):"},
        {"head": ["compared", "documents", "Jaccard index"], "rows": agreement},
        {"text": "Repeated n-grams of the far context as a stand-in for the evaluator:"},
        {"head": ["evaluator", "n", "recall", "precision"], "rows": counter},
    ]


def tabulate_correlate(numbers: dict[str, Any]) -> list[Table]:
    """Return a row for each system, and the correlations of each metric with accuracy."""
    systems = numbers["systems"]
    evaluators = [name for name, found in systems[0]["metrics"].items() if isinstance(found, dict)]
    head = ["model", "system", "accuracy, %", "perplexity", *(f"LongPPL by {name}" for name in evaluators)]
    rows = [
        [
            each["model"],
            each["system"],
            f"{100 * each['accuracy_all']:.1f}",
            f"{each['metrics']['perplexity']:.2f}",
            *(f"{each['metrics'][name]['longppl']:.2f}" for name in evaluators),
        ]
        for each in systems
    ]
    correlations = [
        [name, *(_correlation(found[kind]) for kind in ("spearman", "pearson"))]
        for name, found in numbers["correlations"]["over all"].items()
    ]
    return [
        {"head": head, "rows": rows},
        {"text": "Correlation of the logarithm of each metric with accuracy, over all systems (95% interval):"},
        {"head": ["metric", "Spearman", "Pearson"], "rows": correlations},
    ]


def tabulate_extend(numbers: dict[str, Any]) -> list[Table]:
    """Return LongPPL and perplexity of each method by position."""
    ranges = list(next(iter(numbers["methods"].values()))["ranges"])
    asked = any(found["questions"] for found in numbers["methods"].values())
    head = ["method", *(f"{kind}, {name}" for kind in ("LongPPL", "perplexity") for name in ranges)]
    head += ["passkeys"] if asked else []
    rows = []
    for name, found in numbers["methods"].items():
        cells = [f"{found['ranges'][each][kind]:.2f}" for kind in ("longppl", "perplexity") for each in ranges]
        cells += [f"{found['right']} of {found['questions']}"] if asked else []
        rows.append([name, *cells])
    return [{"head": head, "rows": rows}]


def tabulate_fine_tune(numbers: dict[str, Any]) -> list[Table]:
    """Return perplexities of each weighting and their ratios to cross entropy, by kind of tokens."""
    kinds = list(numbers["rows"][0]["ratio"])
    head = ["start", "weights", "budget", "rate", "steps", *kinds, *(f"{kind}, ratio" for kind in kinds), "accuracy, %"]
    rows = []
    for row in numbers["rows"]:
        perplexities = [f"{row['perplexity'][kind]:.3f}" for kind in kinds]
        ratios = []
        for kind in kinds:
            interval = row["ratio"][kind]["interval"]
            ends = "" if interval is None else f" [{interval[0]:.3f}, {interval[1]:.3f}]"
            ratios.append(f"{row['ratio'][kind]['ratio']:.3f}{ends}")
        about = [row["start"], row["weighting"], row["budget"], f"{row['rate']:g}", str(row["steps"])]
        rows.append([*about, *perplexities, *ratios, f"{100 * row['accuracy']:.1f}"])
    return [
        {"text": "Perplexities over all tokens, key tokens by evaluator, and in short windows:"},
        {"head": head, "rows": rows},
    ]


def _percent(share: float, interval: Sequence[float] | None) -> str:
    ends = "" if interval is None else f" [{100 * interval[0]:.1f}, {100 * interval[1]:.1f}]"
    return f"{100 * share:.1f}{ends}"


def _mean(found: dict[str, Any]) -> str:
    interval = found["interval"]
    return f"{found['mean']:.3f}" + ("" if interval is None else f" [{interval[0]:.3f}, {interval[1]:.3f}]")


def _correlation(found: dict[str, Any]) -> str:
    interval = found["interval"]
    return f"{found['value']:.3f}" + ("" if interval is None else f" [{interval[0]:.3f}, {interval[1]:.3f}]")

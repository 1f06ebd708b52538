"""Options of generation are parsed like those of lm-evaluation-harness."""

import pytest

from lightning_modules.tasks.sampling import generation_options, parse_gen_kwargs


def test_gen_kwargs_are_parsed_like_the_harness():
    assert parse_gen_kwargs(None) == {}
    assert parse_gen_kwargs({"temperature": 0.8}) == {"temperature": 0.8, "do_sample": True}
    assert parse_gen_kwargs("do_sample=true") == {"do_sample": True, "temperature": 1.0}
    assert parse_gen_kwargs(" temperature=0,max_gen_toks=3 ") == {"temperature": 0, "max_gen_toks": 3}
    given = parse_gen_kwargs("temperature=0.8,top_p=0.95 top_k=0,until=['.', \",\"],max_gen_toks=64")
    expected = {"temperature": 0.8, "top_p": 0.95, "top_k": 0, "until": [".", ","], "max_gen_toks": 64}
    assert given == expected | {"do_sample": True}
    sampled = {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "top_k": 0}
    assert generation_options(given) == sampled
    assert generation_options({"do_sample": False, "temperature": 0.7, "top_p": 0.5}) == {"do_sample": False}
    assert generation_options({"until": ["x"], "repetition_penalty": 1.2}) == {
        "do_sample": False,
        "repetition_penalty": 1.2,
    }


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("temperature", "temperature"),
        ("heat=1", "heat"),
        ("temperature=-1", "temperature"),
        ("temperature=.nan", "temperature"),
        ("top_p=0", "top_p"),
        ("min_p=1.1", "min_p"),
        ({"top_k": 2.5}, "top_k"),
        ({"max_gen_toks": 0}, "max_gen_toks"),
    ],
)
def test_invalid_arguments_are_refused(given, name):
    with pytest.raises(ValueError, match=f"`.*{name}"):
        parse_gen_kwargs(given)

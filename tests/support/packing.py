"""A model whose documents are packed without the check, for tests of the packed pass itself."""


def assume_isolation(backbone):
    """Score several documents in one pass, as `check_scoring` allows after its measurements."""
    backbone.isolates_documents = True
    return backbone

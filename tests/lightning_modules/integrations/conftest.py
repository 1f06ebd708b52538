import pytest
from transformers import PreTrainedTokenizerFast

from tests.conftest import tiny_model

# The template marks what the assistant says, which is all that `assistant_only_loss` learns.
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}</s>{% endgeneration %}"
    "{% else %}{{ message.role }}: {{ message.content }}\n{% endif %}{% endfor %}"
)


@pytest.fixture
def chat_tokenizer(model_dir):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model_dir)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture
def model(tokenizer):
    return tiny_model(vocab_size=len(tokenizer), seed=3, tie_word_embeddings=False).train()

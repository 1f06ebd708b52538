"""Times of transfers, against the bytes of Llama-3.1-8B counted by hand."""

from dataclasses import replace

import pytest
import torch

from lightning_modules.commands.plan.activations import ActivationBytes
from lightning_modules.commands.plan.hardware import GPU
from lightning_modules.commands.plan.memory import Training
from lightning_modules.commands.plan.shapes import ModelShape
from lightning_modules.commands.plan.transfers import BANDWIDTH, transfer_seconds

PARAMETERS = 8_030_261_248
CARD = GPU("", 1000, 100, link=400 / BANDWIDTH, host=50 / BANDWIDTH, network=20 / BANDWIDTH)  # GB/s that are reached
TRAINING = Training(32768, checkpointing="full", gpus=8)


@pytest.fixture(scope="module")
def seconds(llamas):
    config = llamas["llama-3.1-8b"]
    shape, activations = ModelShape.of(config), ActivationBytes(config, torch.float32, torch.bfloat16)

    def run(batches=1, **settings):
        training = replace(TRAINING, **settings)
        return transfer_seconds(shape, activations, training, CARD, batches=batches)

    return run


def test_sharded_weights_are_gathered_in_every_pass(seconds):
    # 27 windows of 5,120 tokens, 6 at a time: 5 passes; then forward and backward.
    times = seconds(sharded=True, batches=3)
    assert times["all-gather of weights"] == pytest.approx(3 * (2 + 5) * PARAMETERS * 2 * 7 / 8 / 400e9)
    assert times["reduce-scatter of gradients"] == pytest.approx(3 * PARAMETERS * 4 * 7 / 8 / 400e9)
    without = seconds(sharded=True, batches=3, short_pass=False)["all-gather of weights"]
    assert without == pytest.approx(times["all-gather of weights"] * 2 / 7)


def test_the_gpus_of_a_node_share_its_network(seconds):
    # Each of 4 nodes receives 3 / 4 of the weights through 8 networks of 20 GB/s, slower than NVLink inside.
    times = seconds(sharded=True, gpus=32, short_pass=False)
    assert times["all-gather of weights"] == pytest.approx(2 * PARAMETERS * 2 * 3 / 4 / (8 * 20e9))
    alone = seconds(sharded=True, gpus=4, gpus_per_node=1, short_pass=False)
    assert alone["all-gather of weights"] == pytest.approx(2 * PARAMETERS * 2 * 3 / 4 / 20e9)


def test_gradients_are_summed_once_per_step_without_shards(seconds):
    assert seconds(batches=3) == {"all-reduce of gradients": pytest.approx(2 * PARAMETERS * 4 * 7 / 8 / 400e9)}
    assert seconds(gpus=1) == {}


def test_shared_sequences_exchange_tokens_for_heads(seconds):
    # Query and output of 4,096, key and value of 1,024, in bfloat16; forward, recomputed, backward; 32 layers.
    expected = 3 * 32 * 32768 / 4 * (2 * 4096 + 2 * 1024) * 2 * 3 / 4 / 400e9
    assert seconds(sequence_parallel_size=4)["exchange of Ulysses"] == pytest.approx(expected)
    across = seconds(sequence_parallel_size=4, gpus_per_node=2)["exchange of Ulysses"]
    assert across == pytest.approx(expected * (1 / 2) / (3 / 4) * 400 / 20), "half of the data goes to the other node"


def test_offloaded_states_move_through_main_memory(seconds):
    times = seconds(sharded=True, offload=True, short_pass=False)
    moved = 2 * PARAMETERS * 4 + PARAMETERS * 4
    assert times["weights and gradients from and to main memory"] == pytest.approx(moved / 8 / 50e9)
    inputs = 32768 * 32 * 4096 * 2
    kept = seconds(offload_activations=True)["activations to and from main memory"]
    assert kept == pytest.approx(2 * inputs / 50e9)

"""LongCE in a loop of your own: python plain_pytorch.py, or torchrun --nproc_per_node 8 plain_pytorch.py."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, AutoTokenizer

import longce


def main():
    if "RANK" in os.environ:
        dist.init_process_group()
    rank, processes = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else "cpu"
    name = "HuggingFaceTB/SmolLM2-1.7B"
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name, dtype="float32").to(device).train()
    longce.apply_longce(model, context_length=2048, stride=512)  # before DDP or `fully_shard`
    wrapped = DistributedDataParallel(model) if dist.is_initialized() else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    books = sorted(Path("books").glob("*.txt"))
    books = books[: len(books) // processes * processes]  # all processes must make the same number of steps
    for book in books[rank::processes]:
        ids = tokenizer(book.read_text(), return_tensors="pt")["input_ids"][:, :8192].to(device)
        with torch.autocast(ids.device.type, torch.bfloat16):
            loss = wrapped(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(book.name, loss.item())
    if rank == 0:
        model.save_pretrained("trained")
        tokenizer.save_pretrained("trained")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

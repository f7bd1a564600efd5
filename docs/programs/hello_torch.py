"""torchrun --nproc-per-node 2 hello_torch.py"""
import torch.distributed as dist

dist.init_process_group("gloo")
print(f"hello from process {dist.get_rank()} of {dist.get_world_size()}", flush=True)
dist.destroy_process_group()

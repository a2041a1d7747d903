"""The functions of torch.distributed, on the default group or on a given one."""

"""Back-ends for torch.distributed.checkpoint alone."""

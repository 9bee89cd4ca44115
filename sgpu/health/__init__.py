"""Whether this machine is fit to train: probes that each answer within a deadline, in processes of their own."""

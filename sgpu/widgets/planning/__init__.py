"""The goodput planner: what failures cost a job, and which knob to turn."""

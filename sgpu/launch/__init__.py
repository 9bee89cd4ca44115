"""From a decorated call to started agents: plan (pure), backend (protocol), registry, local."""

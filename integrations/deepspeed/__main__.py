"""``python -m cce_dist.integrations.deepspeed SCRIPT ...``."""

from cce_dist.integrations.deepspeed.launch import main

main()

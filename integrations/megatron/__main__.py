"""``python -m cce_dist.integrations.megatron SCRIPT ...``."""

from cce_dist.integrations.megatron.flags import main

main()

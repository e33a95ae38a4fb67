# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm_megamoe_plugin` is `vllm-megamoe`."""

from .cli import main

if __name__ == "__main__":
    main()

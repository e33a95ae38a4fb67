# SPDX-License-Identifier: Apache-2.0
"""Tools behind the `vllm-megamoe` command line; one module per command."""

# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: ratios against a peer, both measured in one run."""

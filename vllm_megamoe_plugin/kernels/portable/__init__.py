# SPDX-License-Identifier: Apache-2.0
"""Triton kernels for NVFP4 and BF16 experts on SM80 to SM90.

`adapter` says what they can run and binds them, `launch` chooses tiles and launches;
the device code is `decode` (4-bit weights to bf16 in registers), `staging` (tokens as
the kernels read them), `routing` (which tokens an expert gets), `gemm` (both expert
projections) and `combine`. Only `adapter` may be imported without Triton.

Everything is deterministic: no atomics, every sum in one fixed order.
"""

# SPDX-License-Identifier: Apache-2.0
"""Everything that changes the weights of a running server.

`source` reads checkpoint directories, `manifest` says what an update holds, `direct`
applies one in place, `wire` and `sender` carry it from a trainer to `transfer_engine`
in every worker, `state` says whether a model may serve, `gate` keeps an API server from
serving one that may not, `digest` proves the result.

`manifest`, `source`, `wire`, `sender`, `digest` and `gate` need no vLLM; the others do.
"""

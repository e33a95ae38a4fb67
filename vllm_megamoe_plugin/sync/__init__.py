# SPDX-License-Identifier: Apache-2.0
"""Everything that changes the weights of a running server.

`manifest` says what an update holds, `direct` applies one in place, `wire` and
`sender` carry it from a trainer to `transfer_engine` in every worker, `gate` keeps
an API server from serving a mixture, `digest` proves the result.

`manifest`, `wire`, `sender` and `digest` need torch only; the others need vLLM.
"""

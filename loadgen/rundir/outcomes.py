"""How a request may end: the closed list that records, reports and metrics share."""

OUTCOMES = (
    "ok",  # complete reply
    "http_error",  # a status other than 200
    "refused",  # no connection
    "reset",  # the connection broke before or within the reply
    "timeout",  # connect, first byte, idle or total
    "truncated",  # the reply ended cleanly but incomplete
    "protocol_error",  # bytes that the protocol does not allow
    "stream_error",  # an error inside a 200 reply
    "cancelled",  # in flight when the run was stopped
    "dropped",  # due, but never sent
    "node_lost",  # its machine, one of several, was lost before it was known how it ended
    "abandoned",  # given up by the client at the token that --cancel drew: neither ok nor a failure
)
AS_PLANNED = ("ok", "abandoned")  # what the server did not fail

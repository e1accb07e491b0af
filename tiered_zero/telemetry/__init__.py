"""Records of a run: spans of time by lane, bytes by tier, and what bound a step.

Promise: the seconds of a step are its work plus its named waits and sum to its wall time; bytes are counted when they
have arrived, never when they were asked for; a record on disk can be read up to its last line, however the run ended.
Owner: `Recorder` the spans of a run, `Ledger` its bytes, `RunLog` its JSON lines, `TraceWriter` its trace.
Never: torch, a decision that training depends on, a line of log per step.

[Note: Lanes and kinds]
A span lies on a lane (LANES) and has a kind by which it is summed:
on compute `forward`, `backward`, `step`; anywhere a named wait (WAIT_CAUSES), on the lane of the thread that waits.
A span inside another one (opened on the same thread, or on the same lane) takes its seconds away from it: forward's own
seconds are without waits, and the driver's causes sum to its time whichever lanes it works for. A lane's
busy time is the union of its spans, since requests to a disk overlap, less its waits and what was done for other lanes.
"""

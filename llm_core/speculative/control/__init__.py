"""Control loop of speculative decoding: whether to draft in a step, how far, and what to verify.

Goal: the most tokens per second, and never fewer than plain decoding by more than noise.

**Inputs.** Before a step: the batch (``BatchState``). After drafting: the proposed trees and the
time they took. After the step: the accepted paths, the time of the target's forward pass, and the
time of the whole step (drafting, forward pass, sampling and acceptance).

**State.**

- ``VerificationCost``: time of a forward pass by number of tokens, times the current machine load.
- ``DraftCost``: time of drafting by depth, measured once at start-up.
- ``AcceptanceCalibration``: acceptance rate by the probability that the drafter gave.
- ``SpeedupTracker``, one for each class of batch sizes: mean time and tokens of steps with and
  without drafts, and the schedule of trials, cool-downs and probes.

**Decision rule** (``AutoController``), for each step:

1. *Whether* to draft: the tracker of this batch size compares whole steps with drafts against
   whole steps without. Drafting goes on while the speed-up is at least ``MIN_SPEEDUP``. Otherwise
   it rests for a cool-down, which doubles with each failed trial, and is then tried again for
   ``TRIAL_STEPS``. Every second trial is skipped if calibration and costs forecast a loss.
2. *How far* to draft: depth, width and the probability below which a draft is not expanded, from
   costs and acceptance rates.
3. *What to verify*: drafts in order of their calibrated path probability p, as long as
   p > rate * (marginal time of one more token in the forward pass). ``rate`` is the throughput that
   is reached otherwise. This maximises tokens / time in the long run (Dinkelbach 1967); maximising
   the ratio of each single step would not.

Tokens are counted as expected (1 + sum of p), not as accepted: the mean is the same and the noise
lower. Step times are divided by the expected time of a plain step at the current load, so that
steps of different minutes and of similar batch sizes compare.

**Constants** are defined beside the code that uses them. Where they come from:

- ``TRIAL_STEPS`` 8: four steps with a true speed-up of 1.18 measure as a loss every fourth time.
- ``FIRST_COOLDOWN_STEPS`` 48, ``MAX_COOLDOWN_STEPS`` 1536, ``TRIAL_TIME_SHARE`` 1%: with trials for
  each of 16 batch sizes and no bound on their cost, 16 streams lost 7 to 9%; classes of batch sizes
  and this bound brought that to 4 to 5%.
- Skipped trials, and ``HIDDEN_STATE_STEPS`` / ``STOP_CAPTURE_STEPS``: capturing hidden states
  takes 1% of a step with 16 streams; not capturing them while drafting rests, and skipping trials
  that are forecast to fail, removed the remaining 4 to 5%.
- ``SHAPE_REUSE_STEPS`` 8: computing a draft shape takes 1% of a step.
- ``SIBLING_MAX_SEQUENCES`` 4: in larger batches first drafts of other sequences have a higher
  probability than second choices of one.
- All others were set in simulation (tests/unit/llm_core/speculative/test_speculation_control.py)
  and confirmed with ``python -m bench.speculation.speedup``, whose ratios are the regression check.
"""

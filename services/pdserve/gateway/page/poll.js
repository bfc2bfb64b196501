// Ask again and again, while somebody looks.

/**
 * Call `ask` now and then `interval` ms after each answer; `tell(answer, error)` hears of each. A hidden page asks
 * nothing, and asks at once when it is shown again. Returns a function that asks at once.
 */
export function poll(ask, interval, tell) {
  let timer = 0;
  let running = false;
  async function round() {
    if (running || document.hidden) return;
    clearTimeout(timer);
    running = true;
    const [answer, error] = await ask().then(
      (value) => [value, null],
      (reason) => [null, reason],
    );
    running = false;
    timer = setTimeout(round, interval);
    tell(answer, error);
  }
  document.addEventListener("visibilitychange", round);
  round();
  return round;
}

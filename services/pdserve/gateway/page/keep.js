// What this browser keeps from one visit to the next. Some keep nothing; then the page begins anew each time.

/** What was kept under this name, or null. */
export function recall(name) {
  try {
    return JSON.parse(localStorage.getItem(name));
  } catch {
    return null; // no storage, or something that is not ours
  }
}

/** Keep a value that JSON can hold. */
export function keep(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
  } catch {
    // no storage, or no room
  }
}

// Before the first paint, so that nothing flashes: the theme that was chosen here, else the system's.
"use strict";
{
  let chosen = "";
  try {
    chosen = JSON.parse(localStorage.getItem("pdserve.theme"));
  } catch {
    // no storage, or something that is not ours
  }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
}

// Before the first paint, so that nothing flashes: the theme that was chosen here, else the system's.
"use strict";
{
  const chosen = localStorage.getItem("pdserve.theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
}

"use strict";
// Filters of the overview, kept in the address so that a view can be shared; arrow keys in the matrix. All else works without.
const form = document.getElementById("filters");
const rows = [...document.querySelectorAll("tr[data-upstream]")];

function apply() {
  const wanted = [...new FormData(form)].filter(([, value]) => value !== "");
  let shown = 0;
  for (const row of rows) {
    const fits = wanted.every(([name, value]) =>
      name === "text"
        ? value.toLowerCase().split(/\s+/).every((word) => row.dataset.text.includes(word))
        : row.dataset[name] === value);
    row.hidden = !fits;
    shown += fits;
  }
  for (const group of document.querySelectorAll(".group"))
    group.hidden = !group.querySelector("tr[data-upstream]:not([hidden])");
  document.getElementById("none").hidden = shown > 0 || rows.length === 0;
  document.getElementById("shown").textContent = `${shown} of ${rows.length} packs`;
  history.replaceState(null, "", wanted.length ? "#" + new URLSearchParams(wanted) : location.pathname);
}

function read() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  for (const field of form.elements) if (field.name) field.value = wanted.get(field.name) ?? "";
  apply();
}

form.addEventListener("input", apply);
form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("reset", () => setTimeout(apply));
addEventListener("hashchange", read);
form.hidden = false;
read();

const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
document.addEventListener("keydown", (event) => {
  const step = steps[event.key];
  const cell = event.target.closest?.(".matrix td, .matrix th");
  if (!step || !cell || event.altKey || event.ctrlKey || event.metaKey) return;
  const lines = [...cell.closest("table").rows].filter((row) => !row.hidden);
  let [y, x] = [lines.indexOf(cell.parentElement), cell.cellIndex];
  do {
    y += step[0];
    x += step[1];
    const link = lines[y]?.cells[x]?.querySelector("a");
    if (link) {
      event.preventDefault();
      link.focus();
      return;
    }
  } while (lines[y]?.cells[x]);
});

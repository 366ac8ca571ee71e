"use strict";

// A click on a head sorts by its column: up, down, and as it was. Empty cells stay last.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const original = [...body.rows];
  const heads = [...table.tHead.rows[0].cells];
  const key = (row, column) => {
    const given = row.cells[column].dataset.key;
    return given === undefined || given === "" || Number.isNaN(Number(given)) ? given : Number(given);
  };
  const compare = (column, sign) => (one, other) => {
    const [a, b] = [key(one, column), key(other, column)];
    if (a === "" || b === "") return (a === "") - (b === "");
    if (typeof a === typeof b && typeof a === "number") return sign * (a - b);
    return sign * String(a).localeCompare(String(b), "en", { numeric: true });
  };
  for (const head of heads) {
    head.querySelector("button").addEventListener("click", () => {
      const before = head.getAttribute("aria-sort");
      const now = before === "ascending" ? "descending" : before === "descending" ? "none" : "ascending";
      heads.forEach((one) => one.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", now);
      const sign = now === "ascending" ? 1 : -1;
      const rows = now === "none" ? original : [...original].sort(compare(head.cellIndex, sign));
      body.append(...rows);
    });
  }
}

// Paper has no clicks: what is folded is printed.
const folded = [];
addEventListener("beforeprint", () => {
  for (const one of document.querySelectorAll("details:not([open])")) {
    one.open = true;
    folded.push(one);
  }
});
addEventListener("afterprint", () => folded.splice(0).forEach((one) => (one.open = false)));

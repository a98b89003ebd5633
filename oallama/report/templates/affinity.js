"use strict";
(() => {
  const operators = document.getElementById("operators");
  const body = operators.tBodies[0];
  const headings = Array.from(operators.tHead.rows[0].cells);
  const rows = Array.from(body.rows);
  const nameColumn = headings.findIndex((heading) => heading.textContent === "operator");

  // Sorting: every heading becomes a button. A column that holds numbers sorts by number.
  const key = (row, column) => row.cells[column].dataset.key ?? row.cells[column].textContent;
  const natural = new Intl.Collator("en", { numeric: true });
  const asNumber = (text) => (text === "-inf" ? -Infinity : Number(text));
  headings.forEach((heading, column) => {
    const numeric = rows.every((row) => !Number.isNaN(asNumber(key(row, column))));
    const compare = numeric
      ? (a, b) => asNumber(key(a, column)) - asNumber(key(b, column))
      : (a, b) => natural.compare(key(a, column), key(b, column));
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = heading.textContent;
    heading.replaceChildren(button);
    button.addEventListener("click", () => {
      const down = heading.getAttribute("aria-sort") === "ascending";
      headings.forEach((other) => other.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", down ? "descending" : "ascending");
      rows.sort((a, b) => (down ? compare(b, a) : compare(a, b)));
      body.append(...rows);
    });
  });

  // Filtering by name and place.
  const filter = document.getElementById("filter");
  const place = document.getElementById("place");
  const shown = document.getElementById("shown");
  const apply = () => {
    const wanted = filter.value.toLowerCase();
    let count = 0;
    for (const row of rows) {
      const visible = row.cells[nameColumn].textContent.toLowerCase().includes(wanted)
        && (!place.value || row.dataset.place === place.value);
      row.hidden = !visible;
      count += visible;
    }
    shown.textContent = `${count} of ${rows.length} shown`;
  };
  document.querySelector(".controls").hidden = false;
  filter.addEventListener("input", apply);
  place.addEventListener("input", apply);
  apply();

  // The map: one tab stop, arrow keys inside, the numbers of the table's row as a tooltip.
  const tip = document.getElementById("tip");
  const marks = Array.from(document.querySelectorAll(".mark"));
  const at = (mark) => [Number(mark.dataset.row), Number(mark.dataset.column)];
  const names = headings.map((heading) => heading.textContent);

  const hide = () => {
    tip.hidden = true;
    document.querySelector("[aria-describedby=tip]")?.removeAttribute("aria-describedby");
  };
  const show = (mark) => {
    hide();
    const row = document.getElementById(mark.hash.slice(1));
    const title = document.createElement("strong");
    title.textContent = row.cells[nameColumn].textContent;
    const list = document.createElement("dl");
    names.forEach((name, column) => {
      if (column === nameColumn) return;
      const term = document.createElement("dt");
      const value = document.createElement("dd");
      term.textContent = name;
      value.textContent = row.cells[column].textContent;
      list.append(term, value);
    });
    tip.replaceChildren(title, list);
    tip.hidden = false;
    mark.setAttribute("aria-describedby", "tip");
    const box = mark.getBoundingClientRect();
    const left = Math.min(Math.max(8, box.left + box.width / 2 - tip.offsetWidth / 2), innerWidth - tip.offsetWidth - 8);
    const below = box.bottom + 8 + tip.offsetHeight < innerHeight;
    tip.style.left = `${Math.max(8, left)}px`;
    tip.style.top = `${below ? box.bottom + 8 : Math.max(8, box.top - tip.offsetHeight - 8)}px`;
  };
  const step = (from, key) => {
    const [row, column] = at(from);
    const distance = (mark) => {
      const [r, c] = at(mark);
      if (key === "ArrowRight") return r === row && c > column ? c - column : Infinity;
      if (key === "ArrowLeft") return r === row && c < column ? column - c : Infinity;
      if (key === "Home") return r === row ? c : Infinity;
      if (key === "End") return r === row ? -c : Infinity;
      const rows = key === "ArrowDown" ? r - row : row - r;
      return rows > 0 ? rows * 1000 + Math.abs(c - column) : Infinity;
    };
    return marks.reduce((best, mark) => (distance(mark) < distance(best) ? mark : best), from);
  };
  const keys = new Set(["ArrowRight", "ArrowLeft", "ArrowUp", "ArrowDown", "Home", "End"]);

  marks.forEach((mark, index) => {
    mark.tabIndex = index === 0 ? 0 : -1;
    mark.addEventListener("mouseenter", () => show(mark));
    mark.addEventListener("mouseleave", hide);
    mark.addEventListener("focus", () => {
      marks.forEach((other) => { other.tabIndex = -1; });
      mark.tabIndex = 0;
      show(mark);
    });
    mark.addEventListener("blur", hide);
    mark.addEventListener("click", () => {
      filter.value = "";
      place.value = "";
      apply();
    });
    mark.addEventListener("keydown", (event) => {
      if (!keys.has(event.key)) return;
      event.preventDefault();
      step(mark, event.key).focus();
    });
  });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
  document.addEventListener("scroll", hide, { passive: true });
})();

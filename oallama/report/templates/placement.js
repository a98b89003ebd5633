"use strict";
(() => {
  const EVERY_MS = 2000;
  const places = new Map(Array.from(document.querySelectorAll("[data-live]"), (place) => [place.dataset.live, place]));
  const shown = document.documentElement.dataset.plan;
  const say = (name, text) => {
    const place = places.get(name);
    if (place.textContent !== text) place.textContent = text;
  };
  const rate = (measured) => (measured && measured.tokens_per_s ? `${measured.tokens_per_s.toPrecision(3)} tokens/s` : "-");
  const blocks = document.getElementById("blocks");
  const milliseconds = (seconds) => (seconds * 1e3).toPrecision(3);
  const showBlocks = (operators) => {
    const rows = operators.flatMap(({ name, measured }) => (measured ?? []).map((time) => {
      const row = document.createElement("tr");
      const cells = [time.batch, time.runs, ...[time.seconds, time.cpu_s, time.wait_s].map(milliseconds)];
      for (const text of [name, ...cells]) row.insertCell().textContent = text;
      for (const cell of Array.from(row.cells).slice(1)) cell.className = "number";
      return row;
    }));
    blocks.querySelector("tbody").replaceChildren(...rows);
    blocks.hidden = rows.length === 0;
  };
  const show = (placement) => {
    if (placement.plan_fingerprint !== shown) {
      location.reload();
      return;
    }
    const { state, live } = placement;
    say("state", state.status);
    say("said", state.said ?? "");
    places.get("said").hidden = !state.said;
    say("generation", rate(live?.generation));
    say("prompt", rate(live?.prompt));
    showBlocks(placement.operators);
    say("requests", live ? `${live.processing}, ${live.waiting}` : "-");
  };
  const ask = async () => {
    if (document.hidden) return;
    try {
      const answer = await fetch("placement", { cache: "no-store" });
      if (!answer.ok) throw new Error(String(answer.status));
      show(await answer.json());
    } catch {
      say("state", "no answer");
    }
  };
  setInterval(ask, EVERY_MS);
  document.addEventListener("visibilitychange", ask);
  ask();
})();

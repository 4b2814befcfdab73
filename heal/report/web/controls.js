// Mouse, keyboard, buttons and themes.
(() => {
  const { data, state, view, panels, charts, draw, look, select, hover, unhover, whole, filterIncidents, kinds, ranks } = HealReport;
  const { html, glyph, svg, LEFT, RIGHT } = Chart;
  const byId = (id) => document.getElementById(id);
  const MIN_DRAG = 4; // pixels; less is a click

  const showAll = () => look(whole());
  const zoom = (factor, at) => look(Numbers.zoomed(view.range, whole(), factor, at ?? state.cursor ?? (view.range[0] + view.range[1]) / 2));

  // Drag to zoom, hover to read, click a mark to choose its incident.
  let start = null;
  charts.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || !event.target.closest("svg.panel")) return;
    start = { x: event.clientX, value: panels.loss.valueAt(event.clientX) };
  });
  charts.addEventListener("pointermove", (event) => {
    if (!event.target.closest("svg.panel") && start === null) return unhover();
    const value = panels.loss.valueAt(event.clientX);
    if (start !== null && Math.abs(event.clientX - start.x) >= MIN_DRAG) state.drag = [start.value, value];
    hover(value, event.clientX, event.clientY);
  });
  addEventListener("pointerup", () => {
    const drag = state.drag;
    start = state.drag = null;
    if (drag) look([Math.min(...drag), Math.max(...drag)]);
  });
  addEventListener("pointercancel", () => { start = state.drag = null; unhover(); });
  charts.addEventListener("pointerleave", () => { if (start === null) unhover(); });
  charts.addEventListener("dblclick", (event) => { if (event.target.closest("svg.panel")) showAll(); });
  charts.addEventListener("click", (event) => {
    const mark = event.target.closest(".glyph");
    if (!mark || Number(mark.dataset.incident) < 0) return;
    select(Number(mark.dataset.incident), false);
    document.querySelector(`[data-incident-row="${mark.dataset.incident}"]`)?.scrollIntoView({ block: "center" });
  });

  charts.addEventListener("keydown", (event) => {
    if (event.target.closest("input, label")) return;
    const [from, to] = view.range, step = (to - from) / 100;
    const now = state.cursor ?? from;
    const move = (x) => {
      const value = Math.min(to, Math.max(from, x)), box = panels.loss.svg.getBoundingClientRect();
      const told = hover(value, box.left + LEFT + ((value - from) / (to - from)) * (box.width - LEFT - RIGHT), box.top);
      byId("live").textContent = told;
    };
    const nudge = state.axis === "step" ? Math.max(1, step) : step;
    const keys = {
      ArrowRight: () => move(now + nudge), ArrowLeft: () => move(now - nudge), Home: () => move(from), End: () => move(to),
      "+": () => zoom(2), "=": () => zoom(2), "-": () => zoom(0.5), 0: showAll, Escape: () => { unhover(); showAll(); },
    };
    if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    keys[event.key]();
  });

  byId("zoom-in").addEventListener("click", () => zoom(2));
  byId("zoom-out").addEventListener("click", () => zoom(0.5));
  byId("reset").addEventListener("click", showAll);
  byId("print").addEventListener("click", () => print());

  // Filters.
  for (const kind of kinds) {
    const label = html("label", { class: "chip" }, byId("kinds"));
    const box = html("input", { type: "checkbox", checked: "", value: kind }, label);
    const shape = svg("svg", { viewBox: "-7 -7 14 14", "aria-hidden": "true" }, label);
    glyph(kind, 0, 0, shape);
    label.append(`${data.kinds[kind]} ${Numbers.countOnce(data.events.filter((e) => e.kind === kind))}`);
    box.addEventListener("change", () => {
      if (box.checked) state.kinds.add(kind); else state.kinds.delete(kind);
      filterIncidents();
      draw();
    });
  }
  for (const rank of data.ranks) html("option", { value: rank.rank }, byId("rank"), String(rank.rank));
  byId("rank").addEventListener("change", (event) => {
    state.rank = event.target.value;
    filterIncidents();
    draw();
  });
  for (const radio of document.querySelectorAll("input[name=axis]")) {
    radio.addEventListener("change", () => {
      state.axis = radio.value;
      view.range = whole();
      unhover();
      draw();
    });
  }

  // The incidents.
  for (const place of document.querySelectorAll("[data-kind]")) {
    const shape = svg("svg", { viewBox: "-7 -7 14 14", width: 12, height: 12, "aria-hidden": "true" });
    glyph(place.dataset.kind, 0, 0, shape);
    place.prepend(shape);
  }
  for (const row of document.querySelectorAll("[data-incident-row]")) {
    row.querySelector("button").addEventListener("click", () => select(Number(row.dataset.incidentRow), true));
  }

  // The theme: as the system has it, unless the reader chose.
  const THEMES = ["auto", "light", "dark"];
  const apply = (theme) => {
    document.documentElement.dataset.theme = theme;
    byId("theme").textContent = `Theme: ${theme}`;
    byId("theme").setAttribute("aria-label", `Colour theme: ${theme === "auto" ? "automatic" : theme}`);
  };
  const memory = { // a page opened from a file may have no storage
    get: () => { try { return localStorage.getItem("heal-theme"); } catch { return null; } },
    set: (theme) => { try { localStorage.setItem("heal-theme", theme); } catch { /* not kept */ } },
  };
  if (THEMES.includes(memory.get())) apply(memory.get());
  byId("theme").addEventListener("click", () => {
    const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
    apply(next);
    memory.set(next);
  });

  new ResizeObserver(draw).observe(charts);
  filterIncidents();
  draw();
})();

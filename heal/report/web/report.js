// Puts the data into the charts and answers to the reader.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const { decode, isNumber, undone, format, duration, nearest, zoomed } = Numbers;
  const { Panel, svg, html, glyph, LEFT, TOP } = Chart;
  const SILENCE = 30; // times the usual duration of a step
  const byId = (id) => document.getElementById(id);
  const charts = byId("charts"), tooltip = byId("tooltip");

  const ranks = data.ranks.filter((r) => r.records > 0).map((r) => {
    const columns = Object.fromEntries(Object.entries(r.columns).map(([name, values]) => [name, values.map(decode)]));
    return { ...r, ...columns, undone: undone(columns.step) };
  });
  const kinds = Object.keys(data.kinds);
  const state = { axis: "step", rank: "all", kinds: new Set(kinds), selected: -1, cursor: null, drag: null };

  const rows = (rank, value) => rank[state.axis].map((x, i) => (x === null ? null : { x, y: value(i), i }));
  const shown = () => ranks.filter((r) => state.rank === "all" || String(r.rank) === state.rank);
  const events = () => data.events.filter((e) => state.kinds.has(e.kind) && isNumber(e[state.axis])
    && (state.rank === "all" || String(e.rank) === state.rank));

  function whole() {
    let low = Infinity, high = -Infinity;
    const see = (x) => { if (isNumber(x)) { low = Math.min(low, x); high = Math.max(high, x); } };
    for (const rank of ranks) rank[state.axis].forEach(see);
    for (const event of data.events) see(event[state.axis]);
    return low < high ? [low, high] : [low === Infinity ? 0 : low, (low === Infinity ? 0 : low) + 1];
  }

  // Panels.
  const ghostKey = ["undone by a rollback", "ghost"], nanKey = ["NaN or Inf", "nan", "M6,2l7,7m0,-7l-7,7"];
  const panels = {
    events: new Panel(charts, "Events", Math.max(1, kinds.length) * 20),
    loss: new Panel(charts, "Loss", 210, [["loss", "curve"], ghostKey, nanKey], draw),
    norm: new Panel(charts, "Gradient norm", 190, [["norm before clipping", "curve"], ["baseline range", "band", "M0,0H20V10H0Z"], ["clipping threshold", "limit"], nanKey], draw),
    lr: new Panel(charts, "Learning rate", 74, [["used", "lr"], ["scheduled", "wish"]], draw),
    micro: new Panel(charts, "Micro-batches per batch", 48, [["micro-batches", "micro"]]),
    ranks: new Panel(charts, "Ranks", 1, [["stronger colour: slower steps", "heat", "M0,1H20V9H0Z"]]),
  };
  const all = ranks.flatMap((r) => r.loss).filter(isNumber).sort((a, b) => a - b);
  const isWide = (values) => values.length > 0 && values[0] > 0 && values[values.length - 1] > 8 * values[values.length >> 1];
  panels.loss.log.checked = isWide(all);
  panels.norm.log.checked = true;
  panels.lr.log.checked = isWide(ranks.flatMap((r) => r.lr).filter(isNumber).sort((a, b) => a - b));

  const view = { axis: "step", range: whole() };
  const inView = (x) => x >= view.range[0] && x <= view.range[1];
  const visible = (rank, values) => values.filter((_, i) => rank[state.axis][i] !== null && inView(rank[state.axis][i]));

  // Rows in view, and one beyond each end so that curves run off the edge.
  function around(points) {
    let first = 0, last = points.length - 1;
    if (state.axis === "time") {
      while (first < last && points[first + 1] && points[first + 1].x < view.range[0]) first += 1;
      while (last > first && points[last - 1] && points[last - 1].x > view.range[1]) last -= 1;
      return points.slice(first, last + 1);
    }
    const margin = (view.range[1] - view.range[0]) * 0.05 + 12;
    return points.map((p) => (p && p.x >= view.range[0] - margin && p.x <= view.range[1] + margin ? p : null));
  }

  // Along steps what was undone leaves no gap, for it was done again; along time it does.
  const withoutUndone = (points, rank) => (state.axis === "step"
    ? points.filter((p) => p === null || !rank.undone[p.i])
    : points.map((p) => (p === null || rank.undone[p.i] ? null : p)));

  function curve(panel, rank, values, className) {
    const points = around(rows(rank, (i) => values[i]));
    const gone = (p) => p !== null && rank.undone[p.i];
    const before = (p, i) => !gone(p) && points[i + 1] && gone(points[i + 1]);
    panel.line(points.map((p, i) => (gone(p) || before(p, i) ? p : null)), "ghost");
    panel.line(withoutUndone(points, rank), className);
    panel.crosses(points.filter((p) => p && p.y !== null && !isNumber(p.y)).map((p) => p.x), "nan");
  }

  function drawEvents(width) {
    const panel = panels.events, list = events();
    panel.begin(width, view, null, false);
    const rowOf = new Map(kinds.filter((k) => state.kinds.has(k)).map((k, i) => [k, TOP + 10 + i * 20]));
    for (const [kind, y] of rowOf) {
      svg("line", { x1: LEFT, x2: panel.right, y1: y, y2: y, class: "grid" }, panel.clip);
      svg("text", { x: LEFT - 8, y: y + 4, "text-anchor": "end" }, panel.svg).textContent = data.kinds[kind];
    }
    if (data.incidents[state.selected]) panel.shade(...spanOf(data.incidents[state.selected]), "chosen");
    const taken = new Set();
    for (const event of list) {
      const x = panel.x(event[state.axis]), key = `${event.kind}@${Math.round(x / 2)}`;
      if (!inView(event[state.axis]) || taken.has(key)) continue;
      taken.add(key);
      const mark = glyph(event.kind, x, rowOf.get(event.kind), panel.svg);
      mark.dataset.incident = event.incident;
      svg("title", {}, mark).textContent = `step ${event.step}: ${event.text}`;
    }
    return list;
  }

  function marks(panel, list) {
    const chosen = data.incidents[state.selected];
    if (chosen) panel.shade(...spanOf(chosen), "chosen");
    const taken = new Set();
    for (const event of list) {
      const key = `${event.kind}@${Math.round(panel.x(event[state.axis]))}`;
      if (taken.has(key) || !inView(event[state.axis])) continue;
      taken.add(key);
      panel.rule(event[state.axis], `event ${event.kind}${list.length > 300 ? " faint" : ""}`);
    }
  }

  // Whether a rank was at work between two rows: rows are thinned out, so that those in between
  // may be missing; a long silence is shown as one.
  function follows(rank, i, usual) {
    const before = i > 0 ? rank[state.axis][i - 1] : null, steps = i > 0 ? rank.step[i] - rank.step[i - 1] : 0;
    if (before === null || before > rank[state.axis][i]) return false;
    return state.axis === "step" || rank.time[i] - before <= SILENCE * Math.max(1, steps) * (usual || 1);
  }

  function drawRanks(width) {
    const panel = panels.ranks, list = shown(), height = list.length > 32 ? 5 : list.length > 8 ? 10 : 18;
    panel.height = Math.max(1, list.length) * height;
    panel.begin(width, view, null, true);
    const usual = list.map((r) => r.usual_seconds || 0).sort((a, b) => a - b)[list.length >> 1] || 0;
    list.forEach((rank, order) => {
      const y = TOP + order * height, cells = new Map();
      rank[state.axis].forEach((x, i) => {
        if (x === null || !inView(x)) return;
        const slow = isNumber(rank.seconds[i]) && usual ? rank.seconds[i] / usual : 1;
        const from = follows(rank, i, usual) ? Math.max(view.range[0], rank[state.axis][i - 1]) : x;
        for (let cell = Math.floor(panel.x(from) / 4); cell <= Math.floor(panel.x(x) / 4); cell += 1) {
          cells.set(cell, Math.max(cells.get(cell) ?? 0, slow));
        }
      });
      for (const [cell, slow] of cells) {
        const opacity = Math.min(1, 0.18 + 0.25 * Math.max(0, Math.log2(slow)));
        svg("rect", { x: cell * 4, y: y + 1, width: 4.1, height: height - 2, class: "heat", "fill-opacity": opacity.toFixed(2) }, panel.clip);
      }
      if (height < 10 && order % 4) return;
      svg("text", { x: LEFT - 8, y: y + height / 2 + 4, "text-anchor": "end" }, panel.svg).textContent = `rank ${rank.rank}`;
    });
  }

  function draw() {
    view.axis = state.axis;
    const width = Math.max(320, charts.clientWidth), list = drawEvents(width), some = shown();
    const values = (name) => some.flatMap((r) => visible(r, r[name]));
    const main = some[0];
    panels.loss.begin(width, view, values("loss"), true);
    marks(panels.loss, list);
    some.slice().reverse().forEach((r) => curve(panels.loss, r, r.loss, r === main ? "curve" : "curve peer"));
    panels.norm.begin(width, view, [...values("norm"), ...values("threshold")], true);
    marks(panels.norm, list);
    if (main) {
      const z = decode(data.z_threshold) ?? 2.5;
      const kept = (points) => points.filter((p) => p && !main.undone[p.i]);
      panels.norm.band(kept(around(rows(main, (i) => main.mean[i]))).filter((p) => p.y > 0).map((p) => (
        { x: p.x, low: p.y - z * main.std[p.i], high: p.y + z * main.std[p.i] })), "band");
      panels.norm.line(kept(around(rows(main, (i) => main.threshold[i]))), "limit", true);
      curve(panels.norm, main, main.norm, "curve");
    }
    const used = (r) => r.lr.map((lr, i) => (lr === null ? null : lr * (r.lr_scale[i] ?? 1)));
    panels.lr.begin(width, view, main ? [...values("lr"), ...visible(main, used(main))] : [], false);
    panels.micro.begin(width, view, [1, ...values("micro_batches")], false);
    for (const panel of [panels.lr, panels.micro]) marks(panel, list);
    if (main) {
      const kept = (values) => withoutUndone(around(rows(main, (i) => values[i])), main);
      panels.lr.line(kept(main.lr), "wish");
      curve(panels.lr, main, used(main), "lr");
      panels.micro.line(kept(main.micro_batches), "micro", true);
    }
    drawRanks(width);
    marks(panels.ranks, list.filter((e) => e.kind !== "note"));
    const full = whole();
    byId("reset").disabled = view.range[0] <= full[0] && view.range[1] >= full[1];
    charts.dataset.range = view.range.map((x) => x.toFixed(2)).join(" ");
    describe(main);
    showCursor();
  }

  function describe(main) {
    const along = state.axis === "step" ? "steps" : "time";
    for (const name of ["loss", "norm"]) {
      const values = main ? visible(main, main[name]).filter(isNumber) : [];
      const told = values.length ? `, from ${format(values[0])} to ${format(values[values.length - 1])}` : ", no data";
      panels[name].svg.setAttribute("aria-label", `${panels[name].title} over ${along}${told}`);
    }
  }

  // The cursor: a line through all panels, and what is there.
  let overlay = [];
  function showCursor() {
    overlay.forEach((element) => element.remove());
    overlay = [];
    if (state.drag) for (const panel of Object.values(panels)) overlay.push(panel.shade(Math.min(...state.drag), Math.max(...state.drag), "drag"));
    if (state.cursor === null) return;
    for (const panel of Object.values(panels)) overlay.push(panel.rule(state.cursor, "cross"));
  }

  function rowAt(rank, x) {
    const kept = rank[state.axis].map((value, i) => [value, i]).filter(([value, i]) => value !== null && (state.axis === "time" || !rank.undone[i]));
    const place = nearest(kept.map(([value]) => value), x);
    return place < 0 ? -1 : kept[place][1];
  }

  function readout(x) {
    const main = shown()[0], i = main ? rowAt(main, x) : -1, told = [];
    if (i < 0) return { told, near: [], at: x };
    told.push(["step", format(main.step[i])], ["time", duration(main.time[i])], ["loss", format(main.loss[i])],
      ["gradient norm", format(main.norm[i])], ["threshold", format(main.threshold[i])],
      ["learning rate", format(main.lr[i] === null ? null : main.lr[i] * (main.lr_scale[i] ?? 1))], ["micro-batches", format(main.micro_batches[i])]);
    const again = state.axis === "step" ? main.step.map((_, j) => j).filter((j) => main.undone[j] && main.step[j] === main.step[i]) : [];
    if (again.length) told.push(["loss before the rollback", again.map((j) => format(main.loss[j])).join(", ")]);
    if (isNumber(main.seconds[i])) told.push(["step took", duration(main.seconds[i])]);
    const reach = (view.range[1] - view.range[0]) * 0.006 + (state.axis === "step" ? 0.5 : 0);
    const near = events().filter((e) => Math.abs(e[state.axis] - x) <= reach).slice(0, 5);
    return { told, near, at: main[state.axis][i] };
  }

  function hover(x, clientX, clientY) {
    const { told, near, at } = readout(x);
    state.cursor = at;
    showCursor();
    tooltip.replaceChildren();
    const table = html("table", {}, tooltip);
    for (const [name, value] of told) {
      const row = html("tr", {}, table);
      html("td", {}, row, name);
      html("td", {}, row, value);
    }
    if (near.length) {
      const happened = html("div", { class: "happened" }, tooltip);
      for (const event of near) html("div", {}, happened, `${event.text} (${data.kinds[event.kind]}, step ${event.step})`);
    }
    tooltip.hidden = told.length === 0;
    const wide = tooltip.offsetWidth, high = tooltip.offsetHeight;
    tooltip.style.left = `${clientX + 18 + wide > innerWidth ? Math.max(4, clientX - 18 - wide) : clientX + 18}px`;
    tooltip.style.top = `${Math.max(4, Math.min(clientY + 12, innerHeight - high - 8))}px`;
    return told.map(([name, value]) => `${name} ${value}`).concat(near.map((e) => e.text)).join(", ");
  }

  function unhover() {
    state.cursor = null;
    tooltip.hidden = true;
    showCursor();
  }

  const spanOf = (incident) => state.axis === "step"
    ? [Math.min(incident.first_step, incident.resumed_at ?? incident.first_step), incident.last_step]
    : [(incident.time ?? 0) - (data.began ?? 0), (incident.time ?? 0) - (data.began ?? 0)];

  function look(range) {
    const [first, last] = whole();
    const from = Math.max(first, range[0]), to = Math.min(last, range[1]);
    if (to > from) view.range = [from, to];
    draw();
  }

  function select(index, zooms) {
    state.selected = index;
    for (const row of document.querySelectorAll("[data-incident-row]")) {
      const isIt = Number(row.dataset.incidentRow) === index;
      row.classList.toggle("selected", isIt);
      row.setAttribute("aria-current", String(isIt));
    }
    const incident = data.incidents[index];
    if (!incident || !zooms) return draw();
    const [from, to] = spanOf(incident), [first, last] = whole();
    const margin = Math.max((to - from) * 0.8, (last - first) * 0.02, state.axis === "step" ? 8 : 1);
    look([from - margin, to + margin]);
    byId("charts-section").scrollIntoView({ block: "start" });
  }

  function filterIncidents() {
    let count = 0;
    for (const row of document.querySelectorAll("[data-incident-row]")) {
      const incident = data.incidents[Number(row.dataset.incidentRow)];
      const isShown = state.kinds.has(incident.kind) && (state.rank === "all" || incident.ranks.map(String).includes(state.rank));
      row.hidden = !isShown;
      count += isShown ? 1 : 0;
    }
    byId("incident-count").textContent = count === data.incidents.length ? String(count) : `${count} of ${data.incidents.length}`;
  }

  Object.assign(globalThis, { HealReport: { data, state, view, panels, charts, tooltip, draw, look, select, hover, unhover, whole, filterIncidents, kinds, ranks } });
})();

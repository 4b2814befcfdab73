// Draws panels of SVG that share one x axis. What to draw is decided in report.js.
const Chart = (() => {
  const SVG = "http://www.w3.org/2000/svg";
  const LEFT = 92, RIGHT = 14, TOP = 8, LABELS = 20;
  const { isNumber, thin, extent, linearTicks, timeTicks, logTicks, format, duration } = Numbers;

  function svg(name, attributes, parent) {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (parent) parent.append(element);
    return element;
  }

  function html(name, attributes, parent, text) {
    const element = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    if (parent) parent.append(element);
    return element;
  }

  // A shape of its own for every kind of event: none is told by colour alone.
  const SHAPES = {
    halt: "M-5,-5L5,5M-5,5L5,-5", rollback: "M5,-5L-5,0L5,5Z", soften: "M-5,-4L5,-4L0,5Z",
    memory: "M-4.5,-4.5H4.5V4.5H-4.5Z", wait: "M-4,-5H4L-4,5H4Z", data: "M0,-6L6,0L0,6L-6,0Z",
    refused: "M-5,0A5,5 0 1 0 5,0A5,5 0 1 0 -5,0Z", alert: "M0,-5L5.5,5H-5.5Z",
    start: "M-3,-6L-3,6M-3,-6L5,-3L-3,0", note: "M-2,0A2,2 0 1 0 2,0A2,2 0 1 0 -2,0Z",
  };

  function glyph(kind, x, y, parent) {
    const mark = svg("g", { class: `glyph ${kind}`, transform: `translate(${x},${y})` }, parent);
    svg("path", { d: SHAPES[kind] ?? SHAPES.note }, mark);
    svg("circle", { r: 8, class: "hit" }, mark); // shapes are thin or hollow: easier to point at
    return mark;
  }

  class Panel {
    constructor(parent, title, height, keys = [], onLog = null) {
      this.height = height;
      this.title = title;
      this.box = html("div", { class: "panel-box" }, parent);
      const head = html("div", { class: "panel-head" }, this.box);
      html("h3", {}, head, title);
      const legend = html("div", { class: "legend" }, head);
      for (const [name, className, shape] of keys) {
        const key = html("span", { class: "key" }, legend);
        const sample = svg("svg", { viewBox: "0 0 20 10", "aria-hidden": "true" }, key);
        svg("path", { d: shape ?? "M0,5H20", class: className }, sample);
        key.append(name);
      }
      if (onLog) {
        const label = html("label", { class: "log no-print" }, head);
        this.log = html("input", { type: "checkbox" }, label);
        label.append("log scale");
        this.log.addEventListener("change", onLog);
      }
      this.svg = svg("svg", { class: "panel", role: "img", "aria-label": title }, this.box);
    }

    get isLog() { return Boolean(this.log && this.log.checked); }

    // Empties the panel and prepares its scales.
    begin(width, view, values, labelled) {
      this.svg.replaceChildren();
      this.bottom = TOP + this.height;
      const whole = this.bottom + (labelled ? LABELS : 6);
      this.svg.setAttribute("viewBox", `0 0 ${width} ${whole}`);
      this.right = width - RIGHT;
      this.view = view;
      const [from, to] = view.range;
      this.x = (value) => LEFT + ((value - from) / (to - from || 1)) * (this.right - LEFT);
      this.clip = svg("svg", { x: LEFT, y: 0, width: this.right - LEFT, height: this.bottom, viewBox: `${LEFT} 0 ${this.right - LEFT} ${this.bottom}` }, this.svg);
      if (values) this.#scale(values);
      const many = Math.max(2, Math.floor((this.right - LEFT) / 110));
      for (const tick of view.axis === "time" ? timeTicks(from, to, many) : linearTicks(from, to, many)) {
        const x = this.x(tick);
        svg("line", { x1: x, x2: x, y1: TOP, y2: this.bottom, class: "grid" }, this.clip);
        if (labelled) {
          const label = view.axis === "time" ? duration(tick) : format(tick);
          svg("text", { x, y: this.bottom + 15, "text-anchor": "middle" }, this.svg).textContent = label;
        }
      }
      svg("line", { x1: LEFT, x2: this.right, y1: this.bottom, y2: this.bottom, class: "axis" }, this.svg);
    }

    #scale(values) {
      const isLog = this.isLog;
      const [low, high] = extent(values, isLog);
      const at = isLog ? Math.log10 : (value) => value;
      this.y = (value) => this.bottom - ((at(value) - at(low)) / (at(high) - at(low))) * (this.bottom - TOP);
      const wanted = Math.max(2, Math.floor(this.height / 36));
      for (const tick of isLog ? logTicks(low, high, wanted) : linearTicks(low, high, wanted)) {
        const y = this.y(tick);
        if (y < TOP - 1 || y > this.bottom + 1) continue;
        svg("line", { x1: LEFT, x2: this.right, y1: y, y2: y, class: "grid" }, this.svg);
        svg("text", { x: LEFT - 8, y: y + 4, "text-anchor": "end" }, this.svg).textContent = format(tick);
      }
      this.svg.append(this.clip);
    }

    #drawable(value) { return isNumber(value) && !(this.isLog && value <= 0); }

    // One path through runs of points; a run ends where a value is missing.
    line(points, className, stepped = false) {
      let path = "", run = [];
      const flush = () => {
        thin(run, this.x).forEach((point, i) => {
          const x = this.x(point.x).toFixed(1), y = this.y(point.y).toFixed(1);
          path += i === 0 ? `M${x},${y}` : stepped ? `H${x}V${y}` : `L${x},${y}`;
        });
        if (run.length === 1) path += "h0.01";
        run = [];
      };
      for (const point of points) {
        if (point && this.#drawable(point.y)) run.push(point); else flush();
      }
      flush();
      if (path) svg("path", { d: path, class: className, "stroke-linecap": "round" }, this.clip);
    }

    band(points, className) {
      const inside = points.filter((p) => this.#drawable(p.high));
      if (inside.length < 2) return;
      const floor = (value) => (this.#drawable(value) ? Math.min(this.bottom, this.y(value)) : this.bottom);
      const place = (x, y) => `${this.x(x).toFixed(1)},${y.toFixed(1)}`;
      const upper = inside.map((p) => place(p.x, this.y(p.high)));
      const lower = inside.reverse().map((p) => place(p.x, floor(p.low)));
      svg("path", { d: `M${[...upper, ...lower].join("L")}Z`, class: className }, this.clip);
    }

    crosses(xs, className) {
      const pixels = new Set(xs.map((x) => Math.round(this.x(x))));
      const path = [...pixels].map((x) => `M${x - 3},${TOP}l6,6m0,-6l-6,6`).join("");
      if (path) svg("path", { d: path, class: className }, this.clip);
    }

    rule(x, className) {
      const at = this.x(x);
      return svg("line", { x1: at, x2: at, y1: TOP, y2: this.bottom, class: className }, this.clip);
    }

    shade(from, to, className) {
      const start = this.x(from), width = Math.max(3, this.x(to) - start);
      return svg("rect", { x: start, y: 0, width, height: this.bottom, class: className }, this.clip);
    }

    // Which x is under a pointer.
    valueAt(clientX) {
      const box = this.svg.getBoundingClientRect();
      const pixel = ((clientX - box.left) / box.width) * (this.right + RIGHT);
      const [from, to] = this.view.range;
      const share = (pixel - LEFT) / (this.right - LEFT);
      return from + Math.min(1, Math.max(0, share)) * (to - from);
    }
  }

  return { Panel, svg, html, glyph, LEFT, RIGHT, TOP };
})();

"use strict";
// Arithmetic of the charts. Knows nothing of the page, so that it can be tested without one.
const Numbers = (() => {
  const WORDS = { NaN: NaN, Infinity: Infinity, "-Infinity": -Infinity };

  // JSON has no NaN: the words stand for it. null is what nobody told.
  const decode = (value) => (typeof value === "string" ? WORDS[value] ?? null : value);

  const isNumber = (value) => value !== null && value !== undefined && Number.isFinite(value);

  // Which rows a rollback has undone: a later row has the same step or an earlier one.
  function undone(steps) {
    const flags = new Array(steps.length).fill(false);
    let earliest = Infinity;
    for (let i = steps.length - 1; i >= 0; i -= 1) {
      flags[i] = steps[i] >= earliest;
      earliest = Math.min(earliest, steps[i]);
    }
    return flags;
  }

  // Of every pixel the first, least, greatest and last point: a path no longer than the screen.
  function thin(points, pixelOf) {
    const kept = [];
    let column = null, first = null, low = null, high = null, last = null;
    const flush = () => {
      const inside = [low, high].sort((a, b) => a.order - b.order);
      for (const point of [first, ...inside, last]) {
        if (kept[kept.length - 1] !== point) kept.push(point);
      }
    };
    points.forEach((point, order) => {
      point.order = order;
      const pixel = Math.round(pixelOf(point.x));
      if (pixel !== column) {
        if (column !== null) flush();
        column = pixel;
        first = low = high = point;
      }
      if (point.y < low.y) low = point;
      if (point.y > high.y) high = point;
      last = point;
    });
    if (column !== null) flush();
    return kept;
  }

  function extent(values, isLog) {
    let low = Infinity, high = -Infinity;
    for (const value of values) {
      if (!isNumber(value) || (isLog && value <= 0)) continue;
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
    if (low > high) return isLog ? [0.1, 1] : [0, 1];
    if (isLog) return low === high ? [low / 2, high * 2] : [low / (high / low) ** 0.04, high * (high / low) ** 0.06];
    const margin = low === high ? Math.abs(low) * 0.1 || 1 : (high - low) * 0.06;
    return [low - margin, high + margin];
  }

  function linearTicks(low, high, wanted) {
    const rough = (high - low) / Math.max(1, wanted);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
    const ticks = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1) ticks.push(i * step);
    return ticks;
  }

  // Seconds, minutes, hours and days in parts that clocks have.
  function timeTicks(low, high, wanted) {
    const parts = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];
    const rough = (high - low) / Math.max(1, wanted);
    const step = rough <= 1 ? null : parts.find((part) => part >= rough) ?? 86400 * Math.ceil(rough / 86400);
    if (step === null) return linearTicks(low, high, wanted);
    const ticks = [];
    for (let i = Math.ceil(low / step); i * step <= high; i += 1) ticks.push(i * step);
    return ticks;
  }

  // As fine as there is room for: all of 1, 2, 3, 5, some of them, powers of ten, every other one.
  function logTicks(low, high, wanted) {
    const from = Math.floor(Math.log10(low)), to = Math.ceil(Math.log10(high));
    const tries = [[[1, 2, 3, 5], 1], [[1, 2, 5], 1], [[1, 3], 1]];
    for (let every = 1; every <= to - from + 1; every += 1) tries.push([[1], every]);
    for (const [digits, every] of tries) {
      const ticks = [];
      for (let power = Math.ceil(from / every) * every; power <= to; power += every) {
        for (const digit of digits) ticks.push(Number(`${digit}e${power}`));
      }
      const inside = ticks.filter((tick) => tick >= low && tick <= high);
      if (inside.length <= wanted + 1) {
        return inside.length >= 2 ? inside : linearTicks(low, high, wanted).filter((tick) => tick > 0);
      }
    }
    return [low, high];
  }

  function format(value) {
    if (value === null || value === undefined) return "-";
    if (Number.isNaN(value)) return "NaN";
    if (!Number.isFinite(value)) return value > 0 ? "Inf" : "-Inf";
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 1e6 || size < 1e-3) return value.toExponential(2).replace("e+", "e").replace(/\.?0+e/, "e");
    if (Number.isInteger(value)) return value.toLocaleString("en-US");
    return String(Number(value.toPrecision(4)));
  }

  function duration(seconds) {
    if (!isNumber(seconds)) return "-";
    if (seconds < 120) return `${Number(seconds.toFixed(seconds < 10 ? 2 : 1))} s`;
    const rest = Math.round(seconds % 60);
    if (seconds < 7200) return `${Math.floor(seconds / 60)} min${rest ? ` ${rest} s` : ""}`;
    if (seconds < 172800) return `${Number((seconds / 3600).toFixed(1))} h`;
    return `${Number((seconds / 86400).toFixed(1))} days`;
  }

  // How many events there were, where what several ranks tell alike is one.
  function countOnce(events) {
    const told = new Map();
    for (const event of events) {
      const ranks = told.get(`${event.step} ${event.text}`) ?? new Map();
      told.set(`${event.step} ${event.text}`, ranks.set(event.rank, (ranks.get(event.rank) ?? 0) + 1));
    }
    return [...told.values()].reduce((sum, ranks) => sum + Math.max(...ranks.values()), 0);
  }

  // The place in a rising list that is nearest to x; -1 if it is empty.
  function nearest(xs, x) {
    let low = 0, high = xs.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (xs[middle] < x) low = middle + 1; else high = middle;
    }
    return low > 0 && x - xs[low - 1] < xs[low] - x ? low - 1 : high;
  }

  // Zoom by a factor around a place, within what there is.
  function zoomed([from, to], [first, last], factor, around) {
    const width = Math.min(last - first, Math.max((last - first) * 1e-6, (to - from) / factor));
    const share = to > from ? (around - from) / (to - from) : 0.5;
    const start = Math.min(Math.max(first, around - share * width), last - width);
    return [start, start + width];
  }

  return { decode, isNumber, undone, thin, extent, linearTicks, timeTicks, logTicks, format, duration, countOnce, nearest, zoomed };
})();
if (typeof module !== "undefined") module.exports = Numbers;

/* Draws the charts of a page with uPlot. What a chart is stands in loadgen/page/content.py; each arrives as JSON,
   without the fields that have their default. Strings become text nodes or canvas text, never markup. */
"use strict";
(() => {
  const COLOURS = 7; // of the palette in page.css
  const HEIGHT = 240; // of the area between the axes
  const FONT = "12px system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif";
  const FEW = 24; // points of a line that are marked
  const MOST_READ = 8; // curves in the readout
  const REACH = 24; // pixels between the pointer and a point that a click opens
  const QUANTILES = [...Array(100).keys()].map(i => i / 100).concat(0.995, 0.999, 1); // where arrow keys stop

  // ---- numbers and text -------------------------------------------------------------------------------------------

  const formats = new Map();
  const formatted = (value, options) => {
    const key = JSON.stringify(options);
    if (!formats.has(key)) formats.set(key, new Intl.NumberFormat("en", options));
    return formats.get(key).format(value);
  };

  /** A number as the readout has it: four significant digits, and all digits before the point. */
  const number = value => {
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-4 || size >= 1e15)) return value.toExponential(3);
    return formatted(value, {maximumSignificantDigits: Math.max(4, size < 1 ? 0 : Math.floor(Math.log10(size)) + 1)});
  };

  /** Numbers beside an axis, alike in how they are written. */
  const tickTexts = values => {
    const most = Math.max(...values.map(Math.abs)), steps = values.slice(1).map((value, i) => value - values[i]);
    const least = Math.min(...steps.filter(step => step > 0), most || 1);
    if (most >= 1e15 || (most < 1e-3 && most > 0))
      return values.map(value => (value ? Number(value.toPrecision(3)).toExponential() : "0"));
    if (most >= 1e5) return values.map(value => formatted(value, {notation: "compact", maximumSignificantDigits: 4}));
    const even = steps.every(step => Math.abs(step - least) < 1e-6 * least);
    return values.map(value => {
      const part = even ? least : Math.abs(value) || 1;
      const whole = scaled => Math.abs(scaled - Math.round(scaled)) < 1e-6 * scaled;
      let digits = 0;
      while (digits < 9 && !whole(part * 10 ** digits)) digits++;
      return formatted(value, {minimumFractionDigits: even ? digits : 0, maximumFractionDigits: digits});
    });
  };

  /** "ttft (ms)" as its name and its unit; a word alone, "requests/s", is a unit. */
  const named = label => {
    const match = /^(.*?)\s*\(([^()]+)\)\s*$/.exec(label);
    if (match) return {name: match[1], unit: ` ${match[2]}`};
    return /\s/.test(label) || !label ? {name: label, unit: ""} : {name: "", unit: ` ${label}`};
  };

  const element = (tag, names = "", text = "") => {
    const made = document.createElement(tag);
    made.className = names;
    made.textContent = text;
    return made;
  };

  const button = (names, text, pressed, act) => {
    const made = element("button", names, text);
    made.type = "button";
    if (pressed !== null) made.setAttribute("aria-pressed", pressed);
    made.addEventListener("click", () => act(made));
    return made;
  };

  const paint = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const colourOf = series => (series.colour ?? 0) % COLOURS;
  const dotted = series => !series.dashed && (series.colour ?? 0) >= COLOURS; // the palette begins anew
  const dashOf = series => (series.dashed ? [7, 5] : dotted(series) ? [2, 3] : undefined);
  const ruler = document.createElement("canvas").getContext("2d");
  const textWidth = text => {
    ruler.font = FONT;
    return ruler.measureText(text).width;
  };

  // ---- curves -----------------------------------------------------------------------------------------------------

  /** A series with its defaults; `at` has the number of each point in the content. A point without x is a gap at the x
      before it. */
  const curve = series => {
    const made = {...series, kind: series.kind ?? "line", name: series.name ?? "", x: [], y: [], at: []};
    series.x.forEach((x, i) => {
      const known = x !== null;
      if (!known && made.x.length === 0) return;
      made.x.push(known ? x : made.x.at(-1));
      made.y.push(known ? series.y[i] : null);
      made.at.push(i);
    });
    return made;
  };

  /** Index of the last value that is not above `wanted`, -1 where there is none. */
  const lastUpTo = (values, wanted) => {
    let low = 0, high = values.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (values[middle] <= wanted) low = middle + 1;
      else high = middle;
    }
    return low - 1;
  };

  /** The x where a CDF reaches q: a step's first x with as much, a line's x between its points. */
  const quantile = (curve, q) => {
    for (let i = 0, before = -1; i < curve.y.length; i++) {
      if (curve.y[i] === null) continue;
      if (curve.y[i] >= q - 1e-9) {
        if (curve.kind === "step" || before < 0 || curve.y[i] === curve.y[before]) return curve.x[i];
        const part = (q - curve.y[before]) / (curve.y[i] - curve.y[before]);
        return curve.x[before] + Math.min(1, Math.max(0, part)) * (curve.x[i] - curve.x[before]);
      }
      before = i;
    }
    return null;
  };

  /** Curves with x of their own as rows of one x column: undefined where a curve has no point, null where it has a gap.
      Points of one curve at the same x get a row each. */
  const aligned = curves => {
    const next = curves.map(() => 0), xs = [], rows = curves.map(() => []);
    for (;;) {
      let x = Infinity;
      curves.forEach((curve, k) => { if (next[k] < curve.x.length) x = Math.min(x, curve.x[next[k]]); });
      if (x === Infinity) return {xs, rows};
      xs.push(x);
      curves.forEach((curve, k) => rows[k].push(next[k] < curve.x.length && curve.x[next[k]] === x ? next[k]++ : -1));
    }
  };

  /** Ticks of a logarithmic axis: 1, 2, 5 of each decade, or whole decades, or even steps where that gives too few. */
  const logTicks = (low, high, most) => {
    const from = Math.floor(Math.log10(low)), to = Math.ceil(Math.log10(high));
    const ticks = (parts, every) => {
      const values = [];
      for (let decade = from; decade <= to; decade++) {
        if (decade % every) continue;
        for (const part of parts) {
          const value = Number(`${part}e${decade}`);
          if (value >= low * (1 - 1e-9) && value <= high * (1 + 1e-9)) values.push(value);
        }
      }
      return values;
    };
    if (ticks([1, 2, 5], 1).length < 3) {
      const rough = (high - low) / Math.max(2, Math.min(most, 5)), size = 10 ** Math.floor(Math.log10(rough));
      const step = size * [1, 2, 5, 10].find(part => part * size >= rough * 0.999);
      const values = [];
      for (let k = Math.ceil(low / step); k * step <= high; k++) values.push(Number((k * step).toPrecision(12)));
      return values;
    }
    for (const [parts, every] of [[[1, 2, 5], 1], [[1], 1], [[1], 2], [[1], 3], [[1], 6]])
      if (ticks(parts, every).length <= most) return ticks(parts, every);
    return ticks([1], 12);
  };

  // ---- one chart --------------------------------------------------------------------------------------------------

  const views = [];

  class View {
    constructor(figure, spec) {
      Object.assign(this, {figure, spec, zoom: {x: null, y: null}});
      this.hidden = new Set(); // groups, and curves without one
      this.log = new Set(spec.log_now ?? []);
      this.curves = spec.series.map(curve).filter(made => made.x.length > 0);
      this.x = named(spec.x_label ?? "");
      this.y = named(spec.y_label ?? "");
      this.plot = figure.querySelector(".plot");
      this.stop = -1; // where the arrow keys are, of `stops`
      this.addControls();
      this.addKeys();
      this.readout = figure.querySelector(".readout");
    }

    get peers() {
      return this.spec.sync ? views.filter(view => view !== this && view.spec.sync === this.spec.sync) : [];
    }

    get visible() {
      return this.curves.filter(curve => !this.hidden.has(curve.group || curve));
    }

    addControls() {
      const controls = element("div", "controls");
      for (const key of new Set(this.curves.map(curve => curve.group || curve))) {
        const first = this.curves.find(curve => (curve.group || curve) === key);
        const entry = button("key", "", true, pressed => {
          if (!this.hidden.delete(key)) this.hidden.add(key);
          pressed.setAttribute("aria-pressed", !this.hidden.has(key));
          this.draw();
        });
        entry.append(this.swatch(first), first.group || first.name);
        controls.append(entry);
      }
      for (const axis of this.spec.log ?? []) {
        controls.append(button("scale", `log ${axis}`, this.log.has(axis), pressed => {
          if (!this.log.delete(axis)) this.log.add(axis);
          pressed.setAttribute("aria-pressed", this.log.has(axis));
          this.zoom[axis] = null;
          this.draw();
        }));
      }
      this.reset = button("reset", "reset zoom", null, () => {
        this.zoom.y = null;
        for (const view of [this, ...this.peers]) view.zoomTo("x", null);
        this.plot.focus({preventScroll: true});
      });
      this.reset.hidden = true;
      controls.append(this.reset);
      this.figure.querySelector("figcaption").after(controls);
    }

    swatch(curve) {
      const dash = curve.dashed ? " dashed" : dotted(curve) ? " dotted" : "";
      return element("i", `swatch ${curve.kind} c${colourOf(curve)}${dash}`);
    }

    // -- drawing --

    draw() {
      this.uplot?.destroy();
      const bars = this.visible.filter(curve => curve.kind === "bars");
      const names = this.spec.categories ?? [];
      const width = Math.max(this.plot.clientWidth, names.length * 15 + 60);
      this.paint = Object.fromEntries(["ink", "muted", "rule", "ground", "panel", "good", "warning", "bad", "plain",
        ...Array.from({length: COLOURS}, (_, k) => `c${k}`)].map(name => [name, paint(`--${name}`)]));
      this.labels = this.categoryLabels(width - 60);
      const data = this.data(bars);
      const top = 8 + (this.spec.shades?.length ? 16 : 0) + (this.spec.marks?.some(mark => mark.axis === "x") ? 16 : 0);
      this.uplot = new uPlot({
        width,
        height: HEIGHT + top + this.labels.height,
        padding: [top, 14, 0, null],
        legend: {show: false},
        scales: {
          x: {time: false, distr: this.log.has("x") ? 3 : 1, range: () => this.range("x")},
          y: {distr: this.log.has("y") ? 3 : 1, range: () => this.range("y")},
        },
        axes: [this.axis("x"), this.axis("y")],
        series: data.series,
        bands: data.bands,
        cursor: {
          x: !this.spec.quantile,
          y: Boolean(this.spec.quantile),
          points: {show: false},
          drag: {setScale: false, x: true, y: !this.spec.quantile, uni: 30, dist: 5},
          bind: {dblclick: () => () => { this.reset.click(); return null; }},
        },
        hooks: {
          drawClear: [() => this.drawShades()],
          draw: [() => this.drawOver()],
          setCursor: [() => this.point(this.uplot.cursor.left, this.uplot.cursor.top)],
          setSelect: [() => this.select()],
        },
      }, data.columns, this.plot);
      this.uplot.over.addEventListener("click", event => this.follow(event));
      this.reset.hidden = !this.zoom.x && !this.zoom.y;
      this.clear();
    }

    /** What uPlot draws: a column for each curve, and two more for the edges of a band. */
    data(bars) {
      const {xs, rows} = aligned(this.visible);
      const columns = [xs], series = [{}], bands = [];
      const tops = new Map(); // of stacked bars at each x
      this.visible.forEach((curve, k) => {
        const column = values => rows[k].map(i => (i < 0 ? undefined : values[i]));
        const own = values => curve.at.map(i => values[i]);
        const colour = this.paint[`c${colourOf(curve)}`];
        const paths = curve.kind === "step" ? uPlot.paths.stepped({align: 1}) : uPlot.paths.linear();
        const options = {stroke: colour, width: curve.x.length > 300 ? 1.5 : 2, dash: dashOf(curve), paths};
        if (curve.kind === "points") {
          const size = curve.x.length > 2000 ? 3 : curve.x.length > 300 ? 4 : 7;
          const [width, fill] = curve.dashed ? [1.5, "transparent"] : [0, colour];
          Object.assign(options, {paths: () => null, points: {show: true, size, width, fill, stroke: colour}});
        } else {
          const few = curve.kind === "line" && curve.x.length <= FEW;
          const alone = i => i >= 0 && curve.y[i] !== null && (curve.y[i - 1] ?? curve.y[i + 1] ?? null) === null;
          const shown = few ? null : rows[k].flatMap((i, row) => (alone(i) ? [row] : []));
          options.points = {show: few, filter: shown?.length ? shown : null, size: 5, width: 0, fill: colour};
        }
        curve.shown = curve.y;
        if (curve.kind === "bars") Object.assign(options, this.bar(curve, bars, rows[k], xs, tops, colour));
        columns.push(column(curve.shown));
        series.push(options);
        if (curve.low && curve.high && (curve.kind === "line" || curve.kind === "step")) {
          const edge = {stroke: "transparent", width: 0, points: {show: false}, paths};
          columns.push(column(own(curve.low)), column(own(curve.high)));
          bands.push({series: [series.length + 1, series.length], fill: colour + "2e"});
          series.push(edge, {...edge});
        }
      });
      return {columns, series, bands};
    }

    /** How the bars of a curve are drawn: side by side with those of other curves, or on top of them. */
    bar(curve, bars, rows, xs, tops, colour) {
      const distinct = [...new Set(bars.flatMap(bar => bar.x))].sort((a, b) => a - b);
      const space = distinct.reduce((least, x, i) => (i ? Math.min(least, x - distinct[i - 1]) : least), Infinity);
      const stacked = this.spec.stacked;
      const wide = (Number.isFinite(space) ? space : 1) * 0.8;
      const size = stacked ? wide : wide / bars.length;
      const left = stacked ? -wide / 2 : size * bars.indexOf(curve) - wide / 2;
      curve.middle = left + size / 2;
      curve.room = wide;
      const disp = {
        x0: {unit: 1, values: () => xs.map(x => x + left)},
        size: {unit: 1, values: () => [size]},
      };
      if (stacked) {
        const bottoms = curve.x.map((x, i) => {
          const bottom = tops.get(x) ?? 0;
          tops.set(x, bottom + (curve.y[i] ?? 0));
          return bottom;
        });
        curve.shown = curve.y.map((y, i) => (y === null ? null : y + bottoms[i]));
        disp.y0 = {unit: 1, values: () => rows.map(i => (i < 0 ? undefined : bottoms[i]))};
        disp.y1 = {unit: 1, values: () => rows.map(i => (i < 0 ? undefined : curve.shown[i]))};
      }
      const paths = uPlot.paths.bars({disp: this.log.has("x") ? {} : disp, size: [0.8, Infinity, 1]});
      const outlined = {fill: colour + "40", width: 1.5, dash: [4, 3]}, filled = {fill: colour, width: 0};
      return {paths, points: {show: false}, ...(curve.dashed ? outlined : filled)};
    }

    /** From where to where an axis goes: where it is zoomed to, else over all that is visible. */
    range(axis) {
      if (this.zoom[axis]) return this.zoom[axis];
      if (this.spec.quantile && axis === "y") return this.log.has("y") ? [1e-3, 1] : [0, 1];
      const names = this.spec.categories ?? [];
      if (names.length && axis === "x") return [-0.5, names.length - 0.5];
      let low = Infinity, high = -Infinity;
      const log = this.log.has(axis);
      const take = value => {
        if (value === null || value === undefined || (log && value <= 0)) return;
        low = Math.min(low, value);
        high = Math.max(high, value);
      };
      const [from, to] = (axis === "y" && this.zoom.x) || [-Infinity, Infinity];
      for (const curve of this.visible) {
        curve.x.forEach((x, i) => {
          if (axis === "x") return take(x);
          if (x < from || x > to) return undefined;
          take(curve.shown[i]);
          take(curve.low?.[curve.at[i]]);
          return take(curve.high?.[curve.at[i]]);
        });
      }
      const bars = this.visible.filter(curve => curve.kind === "bars");
      for (const mark of this.spec.marks ?? []) if (mark.axis === axis) take(mark.value);
      if (axis === "x") for (const shade of this.spec.shades ?? []) [shade.start, shade.end].forEach(take);
      if (axis === "x") for (const peer of this.peers) for (const curve of peer.curves) curve.x.forEach(take);
      if (low > high) return log ? [1, 10] : [0, 1];
      if (log && bars.length && axis === "y") low = 10 ** Math.floor(Math.log10(low) - 0.01); // bars have a height
      if (log) return low === high ? [low / 2, high * 2] : [low / (high / low) ** 0.02, high * (high / low) ** 0.03];
      const zero = (this.spec.from_zero ?? true) || bars.length;
      if (axis === "y" && zero) [low, high] = [Math.min(0, low), Math.max(0, high)];
      if (axis === "y" && low === 0 && high === 0) return [0, 1];
      if (low === high) [low, high] = [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
      const span = high - low;
      if (axis === "y") return [low === 0 ? 0 : low - 0.05 * span, high === 0 ? 0 : high + 0.05 * span];
      if (bars.length) return [low - bars[0].room * 0.6, high + bars[0].room * 0.6];
      if (low >= 0 && low < 0.15 * span) low = 0;
      else if (this.visible.some(curve => curve.kind === "points")) low -= 0.02 * span;
      return [low, this.spec.sync ? high : high + 0.02 * span];
    }

    axis(axis) {
      const {muted, rule} = this.paint;
      const made = {stroke: muted, font: FONT, gap: 4};
      Object.assign(made, {grid: {stroke: rule, width: 1}, ticks: {stroke: rule, width: 1, size: 4}});
      Object.assign(made, {values: (_, splits) => tickTexts(splits), filter: (_, splits) => splits});
      if (this.log.has(axis)) {
        made.splits = (plot, _, low, high) => logTicks(low, high, axis === "x" ? plot.width / 80 : 8);
      }
      if (axis === "y") {
        made.size = (_, values) => Math.max(34, ...(values ?? []).map(value => textWidth(value) + 12));
        made.space = 32;
      } else {
        made.size = this.labels.height;
        made.space = 64;
        if (this.spec.categories?.length) {
          Object.assign(made, {
            splits: () => this.spec.categories.map((_, i) => i),
            values: (_, splits) => splits.map(i => this.labels.texts[i]),
            rotate: this.labels.rotate,
            grid: {show: false},
          });
        }
      }
      return made;
    }

    /** The names of categories as they fit: in a line, in some lines, or upright. */
    categoryLabels(width) {
      const names = this.spec.categories ?? [];
      if (!names.length) return {texts: [], height: 30, rotate: 0};
      const room = width / names.length - 8;
      const lines = names.map(name => {
        const made = [];
        for (const word of name.split(" ")) {
          const longer = made.length ? `${made.at(-1)} ${word}` : word;
          if (made.length && textWidth(longer) <= room) made[made.length - 1] = longer;
          else made.push(word);
        }
        return made;
      });
      const most = Math.max(...lines.map(made => made.length));
      if (most <= 4 && lines.flat().every(line => textWidth(line) <= room))
        return {texts: lines.map(made => made.join("\n")), height: 14 + 18 * most, rotate: 0};
      const texts = names.map(name => (name.length > 60 ? `${name.slice(0, 59)}…` : name));
      return {texts, height: 16 + Math.max(...texts.map(textWidth)), rotate: -90};
    }

    /** Draws on the canvas in CSS pixels; `clipped` to the area between the axes. */
    onCanvas(act, clipped) {
      const {ctx, bbox} = this.uplot, ratio = uPlot.pxRatio;
      ctx.save();
      if (clipped) {
        ctx.beginPath();
        ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
        ctx.clip();
      }
      ctx.scale(ratio, ratio);
      ctx.setLineDash([]);
      ctx.font = FONT;
      ctx.textBaseline = "middle";
      const [left, top] = [bbox.left / ratio, bbox.top / ratio];
      const area = {left, top, width: bbox.width / ratio, height: bbox.height / ratio};
      act(ctx, area, x => left + this.uplot.valToPos(x, "x"), y => top + this.uplot.valToPos(y, "y"));
      ctx.restore();
    }

    drawShades() {
      const shades = this.spec.shades ?? [];
      const tint = {plain: this.paint.muted, good: this.paint.good, warning: this.paint.warning, bad: this.paint.bad};
      const edges = (shade, area, at) => {
        const end = area.left + area.width;
        const inside = place => Math.min(Math.max(place, area.left), end);
        const place = value => (this.log.has("x") && value <= 0 ? area.left : inside(at(value)));
        return [place(shade.start), place(shade.end)];
      };
      this.onCanvas((ctx, area, at) => {
        shades.forEach((shade, k) => {
          const [left, right] = edges(shade, area, at), tone = shade.tone ?? "plain";
          const wide = Math.max(right - left, 1.5);
          ctx.globalAlpha = tone === "plain" ? (k % 2 ? 0.05 : 0.11) : wide < 4 ? 0.6 : 0.22;
          ctx.fillStyle = tint[tone];
          if (right > area.left && left < area.left + area.width) ctx.fillRect(left, area.top, wide, area.height);
        });
      }, true);
      this.onCanvas((ctx, area, at) => {
        let taken = -Infinity; // names stand above the area, and only where they fit
        ctx.textAlign = "center";
        for (const shade of shades) {
          const [left, right] = edges(shade, area, at), wide = textWidth(shade.label);
          const middle = (left + right) / 2;
          if (right <= left || wide > right - left + 8 || middle - wide / 2 < taken) continue;
          ctx.fillStyle = tint[shade.tone ?? "plain"];
          ctx.fillText(shade.label, middle, area.top - 9);
          taken = middle + wide / 2 + 6;
        }
      }, false);
    }

    drawOver() {
      this.onCanvas((ctx, area, x, y) => {
        for (const curve of this.visible) {
          const apart = curve.kind === "bars" || curve.kind === "points";
          if (apart && curve.low && curve.high) this.whiskers(ctx, curve, x, y);
        }
        this.drawOrigin(ctx, area);
      }, true);
      this.onCanvas((ctx, area, x, y) => this.drawNames(ctx, area, x, y), true);
      this.onCanvas((ctx, area, x, y) => this.drawMarks(ctx, area, x, y), false);
    }

    /** Beside each point its name, where it has one and no other stands there. */
    drawNames(ctx, area, x, y) {
      const taken = [];
      ctx.textAlign = "left";
      ctx.fillStyle = this.paint.ink;
      for (const curve of this.visible) {
        if (!curve.names) continue;
        curve.x.forEach((_, i) => {
          const name = curve.names[curve.at[i]];
          if (!name || curve.y[i] === null) return;
          const wide = textWidth(name), at = x(curve.x[i]), point = y(curve.y[i]);
          const up = point - 16 < area.top ? point + 11 : point - 9;
          const left = at + 6 + wide > area.left + area.width ? at - 6 - wide : at + 6;
          const hit = ([l, u, w]) => left < l + w + 4 && l < left + wide + 4 && Math.abs(up - u) < 13;
          if (taken.some(hit)) return; // the readout has it
          taken.push([left, up, wide]);
          ctx.fillText(name, left, up);
        });
      }
    }

    whiskers(ctx, curve, x, y) {
      ctx.strokeStyle = curve.kind === "bars" ? this.paint.ink : this.paint[`c${colourOf(curve)}`];
      ctx.lineWidth = 1.25;
      const base = curve.x.map((_, i) => (curve.shown[i] ?? 0) - (curve.y[i] ?? 0)); // of stacked bars
      curve.x.forEach((at, i) => {
        const low = curve.low[curve.at[i]], high = curve.high[curve.at[i]];
        if (curve.y[i] === null || low === null || high === null) return;
        const middle = x(at + (curve.middle ?? 0));
        const [bottom, top] = [y(base[i] + low), y(base[i] + high)];
        ctx.beginPath();
        ctx.moveTo(middle, bottom);
        ctx.lineTo(middle, top);
        for (const end of [bottom, top]) {
          ctx.moveTo(middle - 3, end);
          ctx.lineTo(middle + 3, end);
        }
        ctx.stroke();
      });
    }

    /** "EMULATED" across the area: a picture of the chart alone shows it too. */
    drawOrigin(ctx, area) {
      if (!this.spec.origin) return;
      const text = this.spec.origin.toUpperCase();
      const size = Math.min(40, (0.8 * area.width * 12) / (textWidth(text) || 1));
      ctx.font = FONT.replace("12px", `600 ${size}px`);
      ctx.textAlign = "center";
      ctx.globalAlpha = 0.16;
      ctx.fillStyle = this.paint.warning;
      ctx.fillText(text, area.left + area.width / 2, area.top + area.height / 2);
    }

    drawMarks(ctx, area, x, y) {
      let taken = -Infinity;
      for (const mark of [...(this.spec.marks ?? [])].sort((a, b) => a.value - b.value)) {
        const vertical = mark.axis === "x", at = vertical ? x(mark.value) : y(mark.value);
        const [start, size] = vertical ? [area.left, area.width] : [area.top, area.height];
        if (!(at >= start - 0.5 && at <= start + size + 0.5)) continue;
        ctx.strokeStyle = ctx.fillStyle = this.paint.ink;
        ctx.setLineDash([2, 3]);
        ctx.beginPath();
        ctx.moveTo(vertical ? at : area.left, vertical ? area.top : at);
        ctx.lineTo(vertical ? at : area.left + area.width, vertical ? area.top + area.height : at);
        ctx.stroke();
        const wide = textWidth(mark.label);
        if (vertical) {
          const left = Math.max(area.left, Math.min(at - wide / 2, area.left + area.width - wide));
          if (left < taken) continue; // the readout has it
          taken = left + wide + 8;
          ctx.textAlign = "left";
          ctx.fillText(mark.label, left, area.top - (this.spec.shades?.length ? 25 : 9));
        } else {
          const above = at - 18 > area.top ? at - 9 : at + 9;
          ctx.textAlign = "right";
          ctx.lineJoin = "round";
          ctx.lineWidth = 4;
          ctx.setLineDash([]);
          ctx.strokeStyle = this.paint.ground;
          ctx.strokeText(mark.label, area.left + area.width - 4, above);
          ctx.lineWidth = 1;
          ctx.fillText(mark.label, area.left + area.width - 4, above);
        }
      }
    }

    // -- zoom --

    select() {
      const {left, top, width, height} = this.uplot.select;
      const {clientWidth, clientHeight} = this.uplot.over;
      const across = width > 0 && width < clientWidth, up = height > 0 && height < clientHeight;
      const value = (at, axis) => this.uplot.posToVal(at, axis);
      if (up) this.zoom.y = [value(top + height, "y"), value(top, "y")];
      const x = across ? [value(left, "x"), value(left + width, "x")] : this.zoom.x;
      this.dragged = across || up;
      if (across) for (const view of this.peers) view.zoomTo("x", x);
      if (across || up) this.zoomTo("x", x);
    }

    zoomTo(axis, range) {
      this.zoom[axis] = range;
      if (this.uplot) this.draw();
    }

    // -- cursor --

    /** The pointer is at a place of the area, or left it (left is negative). */
    point(left, top) {
      if (left === undefined || left === null || left < 0) {
        for (const view of [this, ...this.peers]) view.clear();
        return;
      }
      this.stop = -1;
      this.show(left, top);
    }

    /** Reads the chart at a place of the area, and charts that share the cursor at its x. */
    show(left, top) {
      const x = this.uplot.posToVal(left, "x");
      this.read(this.spec.quantile ? this.quantiles(this.uplot.posToVal(top, "y")) : this.values(x, left, top));
      if (this.spec.quantile) return;
      for (const view of this.peers) {
        if (!view.uplot) continue;
        const at = view.uplot.valToPos(x, "x");
        if (!(at >= 0 && at <= view.uplot.over.clientWidth)) view.clear();
        else {
          view.uplot.setCursor({left: at, top: 0}, false);
          view.read(view.values(x, at, null));
        }
      }
    }

    quantiles(y) {
      const fine = this.zoom.y || QUANTILES.includes(y);
      const q = Math.min(1, Math.max(0, Number(y.toFixed(fine ? 3 : 2))));
      const hits = this.visible.map(curve => ({curve, x: quantile(curve, q), y: q})).filter(hit => hit.x !== null);
      const texts = hits.map(hit => `${number(hit.x)}${this.x.unit}`);
      return {head: `p${number(100 * q)}`, hits, texts};
    }

    /** How many pixels the cursor is from a point; along x alone where `top` is null: the chart follows another. */
    distance(left, top, x, y) {
      const across = this.uplot.valToPos(x, "x") - left;
      return top === null ? Math.abs(across) : Math.hypot(across, this.uplot.valToPos(y, "y") - top);
    }

    /** What to read at x: of single points the nearest, of every other curve the point at x. */
    values(x, left, top) {
      const hits = [];
      let nearest = null, least = top === null ? REACH : 3 * REACH;
      for (const curve of this.visible) {
        if (curve.kind !== "points") {
          const i = this.pointAt(curve, x, left);
          if (i === null || curve.y[i] === null) continue;
          const far = this.distance(left, top, curve.x[i] + (curve.middle ?? 0), curve.shown[i]);
          hits.push({curve, i, x: curve.x[i], y: curve.y[i], far});
          continue;
        }
        curve.x.forEach((at, i) => {
          if (curve.y[i] === null) return;
          const far = this.distance(left, top, at, curve.y[i]);
          if (far < least) [least, nearest] = [far, {curve, i, x: at, y: curve.y[i], far}];
        });
      }
      if (nearest) hits.push(nearest);
      return {head: this.head(hits, x), hits, texts: hits.map(hit => this.valueText(hit))};
    }

    /** Which point of a curve holds at x: the last of a step, else the nearest. */
    pointAt(curve, x, left) {
      let i = lastUpTo(curve.x, x);
      if (curve.kind === "step") return i < 0 ? null : i;
      if (i + 1 < curve.x.length && (i < 0 || curve.x[i + 1] - x < x - curve.x[i])) i += 1;
      if (curve.kind === "bars") return Math.abs(curve.x[i] - x) > 0.625 * curve.room ? null : i;
      const outside = x < curve.x[0] || x > curve.x.at(-1);
      return outside && Math.abs(this.uplot.valToPos(curve.x[i], "x") - left) > REACH ? null : i;
    }

    head(hits, x) {
      const exact = hits.filter(hit => hit.curve.kind !== "step").map(hit => hit.x);
      const at = exact.length ? exact.reduce((best, one) => (Math.abs(one - x) < Math.abs(best - x) ? one : best)) : x;
      const name = (this.spec.categories ?? [])[Math.round(at)];
      const place = name ?? `${this.x.name ? `${this.x.name} = ` : ""}${number(at)}${this.x.unit}`;
      const shades = (this.spec.shades ?? []).filter(shade => shade.start <= at && at <= shade.end && shade.label);
      const far = mark => Math.abs(this.uplot.valToPos(mark.value, "x") - this.uplot.valToPos(at, "x"));
      const marks = (this.spec.marks ?? []).filter(mark => mark.axis === "x" && far(mark) < 6);
      return [place, ...[...shades, ...marks].map(part => part.label)].join(", ");
    }

    valueText({curve, i}) {
      const at = curve.at[i], low = curve.low?.[at], high = curve.high?.[at];
      const range = (low ?? null) !== null && (high ?? null) !== null ? ` [${number(low)}, ${number(high)}]` : "";
      const label = curve.labels?.[at] ? ` · ${curve.labels[at]}` : "";
      return `${number(curve.y[i])}${range}${this.y.unit}${label}`;
    }

    /** Puts what was read into the text, and dots where it is in the chart. */
    read({head, hits, texts}) {
      this.clear();
      const nearest = hits.map((_, k) => k).sort((a, b) => (hits[a].far ?? 0) - (hits[b].far ?? 0)).slice(0, MOST_READ);
      const single = hits.length === 1 && this.curves.length === 1;
      const between = single && this.spec.quantile ? " =" : hits.length || this.spec.quantile ? ":" : "";
      this.readout.append(element("span", "", `${head}${between}${single ? ` ${texts[0]}` : ""}`), " ");
      if (!hits.length && this.spec.quantile) this.readout.append(element("span", "hint", "not reached"));
      for (const k of nearest.sort((a, b) => a - b)) {
        if (!single) this.addRead(hits[k].curve, texts[k]);
        this.addDot(hits[k]);
      }
      const more = hits.length - nearest.length;
      if (more) this.readout.append(element("span", "hint", `and ${more} more`));
      this.offer(hits);
      const {style, children, offsetHeight} = this.readout;
      this.plot.setAttribute("aria-valuetext", [...children].map(part => part.textContent).join(", "));
      style.minHeight = `${Math.max(offsetHeight, parseFloat(style.minHeight) || 0)}px`; // what is below does not jump
    }

    addRead(curve, text) {
      const names = [curve.group, curve.name].filter((name, k, all) => name && all.indexOf(name) === k);
      const part = element("span");
      part.append(this.swatch(curve), `${names.join(" ")} = ${text}`);
      this.readout.append(part, " ");
    }

    addDot({curve, i, x, y}) {
      if (curve.kind === "bars") return;
      const {over} = this.uplot;
      const left = this.uplot.valToPos(x, "x"), top = this.uplot.valToPos(i === undefined ? y : curve.shown[i], "y");
      if (!(left >= 0 && top >= 0 && left <= over.clientWidth && top <= over.clientHeight)) return;
      const dot = element("div", `dot c${colourOf(curve)}`);
      dot.style.transform = `translate(${left}px, ${top}px)`;
      over.append(dot);
    }

    /** The way to what is behind the nearest point. */
    offer(hits) {
      const linked = hits.filter(hit => hit.i !== undefined && hit.curve.hrefs?.[hit.curve.at[hit.i]]);
      const nearest = linked.reduce((best, hit) => (best && best.far <= hit.far ? best : hit), null);
      if (!nearest) return;
      const link = element("a", "", "open");
      link.href = nearest.curve.hrefs[nearest.curve.at[nearest.i]];
      this.readout.append(link);
      this.link = {link, near: nearest.far <= REACH || (nearest.curve.kind === "bars" && nearest.far < Infinity)};
      this.plot.classList.toggle("pointing", this.link.near);
    }

    clear() {
      this.link = null;
      this.plot.classList.remove("pointing");
      this.readout.replaceChildren();
      if (!this.uplot) return;
      for (const dot of this.uplot.over.querySelectorAll(".dot")) dot.remove();
    }

    follow(event) {
      const dragged = this.dragged;
      this.dragged = false;
      if (!dragged && this.link?.near) {
        event.preventDefault();
        this.link.link.click();
      }
    }

    // -- keyboard --

    /** Where the arrow keys stop: quantiles of a CDF, single points, or each x. */
    get stops() {
      if (this.spec.quantile) return QUANTILES.map(y => ({y}));
      const [from, to] = this.range("x");
      const points = this.visible.filter(curve => curve.kind === "points");
      const curves = points.length ? points : this.visible;
      const all = curves.flatMap(curve => curve.x.map((x, i) => ({x, y: curve.shown[i]})));
      const inside = all.filter(stop => stop.y !== null && stop.x >= from && stop.x <= to);
      inside.sort((a, b) => a.x - b.x || a.y - b.y);
      const same = (stop, other) => stop.x === other.x && (!points.length || stop.y === other.y);
      return inside.filter((stop, i) => !i || !same(stop, inside[i - 1]));
    }

    addKeys() {
      const {plot} = this;
      plot.setAttribute("role", "slider");
      plot.setAttribute("aria-valuemin", 0);
      plot.setAttribute("aria-valuemax", 1);
      plot.setAttribute("aria-valuenow", 0);
      plot.setAttribute("aria-valuetext", "arrow keys read values");
      plot.tabIndex = 0;
      plot.addEventListener("keydown", event => this.key(event));
      plot.addEventListener("blur", event => {
        if (this.readout.contains(event.relatedTarget)) return; // on the way to the link
        this.stop = -1;
        if (this.uplot) this.uplot.setCursor({left: -10, top: -10});
      });
    }

    key(event) {
      if (event.altKey || event.ctrlKey || event.metaKey || !this.uplot) return;
      if (event.key === "Enter" && this.link) {
        this.link.link.click();
        return;
      }
      if (event.key === "Escape") {
        this.uplot.setCursor({left: -10, top: -10});
        if (!this.reset.hidden) this.reset.click();
        return;
      }
      const {stops} = this, last = stops.length - 1, page = Math.max(1, Math.round(stops.length / 10));
      const begin = this.spec.quantile ? 50 : 0, at = this.stop < 0 ? null : Math.min(this.stop, last);
      const moved = {ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: page, PageDown: -page}[event.key];
      const to = event.key === "Home" ? 0 : event.key === "End" ? last : moved && (at === null ? begin : at + moved);
      if (to === undefined || last < 0) return;
      event.preventDefault();
      this.stop = Math.min(last, Math.max(0, to));
      const stop = stops[this.stop];
      const left = stop.x === undefined ? 0 : this.uplot.valToPos(stop.x, "x"), top = this.uplot.valToPos(stop.y, "y");
      this.uplot.setCursor({left, top}, false);
      if (this.spec.quantile) this.read(this.quantiles(stop.y));
      else this.show(left, top);
      this.plot.setAttribute("aria-valuenow", this.stop);
      this.plot.setAttribute("aria-valuemax", Math.max(1, last));
    }
  }

  // ---- the page ---------------------------------------------------------------------------------------------------

  const specs = JSON.parse(document.querySelector('script[type="application/json"]').textContent);
  const drawn = new IntersectionObserver(entries => {
    for (const {isIntersecting, target} of entries) {
      const view = views.find(view => view.figure === target);
      if (isIntersecting && !view.uplot) view.draw();
    }
  }, {rootMargin: "300px"});
  const sized = new ResizeObserver(entries => {
    for (const {target} of entries) {
      const view = views.find(view => view.figure === target);
      if (view.uplot && view.wide !== target.clientWidth) view.draw();
      view.wide = target.clientWidth;
    }
  });
  document.querySelectorAll("figure:not(.empty)").forEach((figure, k) => {
    views.push(new View(figure, specs[k]));
    drawn.observe(figure);
    sized.observe(figure);
  });
  const redraw = () => views.forEach(view => view.uplot && view.draw());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  addEventListener("beforeprint", () => views.forEach(view => view.uplot || view.draw()));

  for (const code of document.querySelectorAll(".code")) {
    code.append(button("copy", "copy", null, pressed => {
      const text = code.querySelector("code");
      const copied = done => {
        pressed.textContent = done ? "copied" : "selected";
        if (!done) getSelection().selectAllChildren(text);
        setTimeout(() => { pressed.textContent = "copy"; }, 1500);
      };
      if (!navigator.clipboard) copied(false);
      else navigator.clipboard.writeText(text.textContent).then(() => copied(true), () => copied(false));
    }));
  }
})();

//! Plots the figures: bandwidth over request size, with a column for each number of requests under way and a
//! row for each disk; below them, where the time of a read goes, and the interference.

use super::table::{self, SYSTEMS, size_name};
use super::{DiskName, Figures, Point};
use plotters::coord::Shift;
use plotters::prelude::*;
use std::path::Path;

const WIDTH: u32 = 420;
const HEIGHT: u32 = 300;
const GREY: RGBColor = RGBColor(130, 130, 130);

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn = Result<(), Box<dyn std::error::Error>>;

fn colour(system: &str) -> RGBColor {
    match system {
        "staged" => RGBColor(200, 60, 40),
        "sendfile" => RGBColor(220, 150, 30),
        "direct" => RGBColor(60, 110, 190),
        "synchronised" => RGBColor(40, 150, 90),
        "streams" => RGBColor(120, 60, 160),
        "disk" => BLACK,
        _ => GREY,
    }
}

/// Draws all plots into an SVG file.
pub(super) fn draw(figures: &Figures, path: &Path) -> Drawn {
    let mut rows: Vec<(DiskName, bool)> = Vec::new();
    for writes in [false, true] {
        rows.extend(table::disks(figures).into_iter().map(|disk| (disk, writes)));
    }
    let columns = table::outstanding(figures);
    let across = columns.len().max(2);
    let size = (WIDTH * across as u32, HEIGHT * (rows.len() as u32 + 1));
    let root = SVGBackend::new(path, size).into_drawing_area();
    root.fill(&WHITE)?;
    let areas = root.split_evenly((rows.len() + 1, across));
    for (number, (disk, writes)) in rows.iter().enumerate() {
        for (at, outstanding) in columns.iter().enumerate() {
            bandwidth(figures, *disk, *writes, *outstanding, &areas[number * across + at])?;
        }
    }
    breakdown(figures, &areas[rows.len() * across])?;
    interference(figures, &areas[rows.len() * across + 1])?;
    root.present()?;
    Ok(())
}

fn bandwidth(
    figures: &Figures,
    disk: DiskName,
    writes: bool,
    outstanding: usize,
    area: &Area<'_>,
) -> Drawn {
    let lines: Vec<(&str, Vec<&Point>)> = SYSTEMS
        .iter()
        .map(|system| (*system, table::line(figures, disk, writes, outstanding, system)))
        .filter(|(system, points)| !points.is_empty() && *system != "network")
        .collect();
    let all = || lines.iter().flat_map(|(_, points)| points.iter());
    let power = |point: &Point| (point.size as f64).log2();
    let ends = all().map(|p| power(p)).fold((f64::MAX, 0.0f64), |(a, b), p| (a.min(p), b.max(p)));
    let top = all().map(|p| p.bytes_per_s / 1e6).fold(1.0, f64::max) * 1.4;
    if lines.is_empty() {
        return Ok(());
    }
    let what = if writes { "writes" } else { "reads" };
    let mut chart = ChartBuilder::on(area)
        .caption(format!("{disk:?} disk, {what}, {outstanding} outstanding"), ("sans-serif", 15))
        .margin(8)
        .x_label_area_size(34)
        .y_label_area_size(52)
        .build_cartesian_2d(ends.0 - 0.2..ends.1 + 0.2, 0.0..top)?;
    chart
        .configure_mesh()
        .light_line_style(WHITE)
        .x_labels(8)
        .x_label_formatter(&|power| size_name(power.round().exp2() as u64))
        .y_label_formatter(&|rate| format!("{rate:.0}"))
        .x_desc("bytes of a request")
        .y_desc("MB/s")
        .draw()?;
    for (system, points) in &lines {
        let colour = colour(system);
        let at = points.iter().map(|p| (power(p), p.bytes_per_s / 1e6));
        chart
            .draw_series(LineSeries::new(at, colour.stroke_width(2)).point_size(2))?
            .label(*system)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 14, y)], colour.stroke_width(2)));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.8))
        .border_style(GREY)
        .draw()?;
    Ok(())
}

/// Draws a bar for each system, showing its reads of the largest measured size up to 1 MiB.
fn breakdown(figures: &Figures, area: &Area<'_>) -> Drawn {
    let alone: Vec<&Point> =
        figures.points.iter().filter(|p| p.outstanding == 1 && !p.writes).collect();
    let size = alone.iter().map(|p| p.size).filter(|size| *size <= 1 << 20).max().unwrap_or(0);
    let bars: Vec<(&Point, [f64; 3])> = alone
        .iter()
        .filter(|point| point.size == size)
        .filter_map(|point| Some((*point, point.stages_us?)))
        .collect();
    let top = bars.iter().map(|(_, stages)| stages.iter().sum()).fold(1.0, f64::max) * 1.15;
    let names: Vec<String> =
        bars.iter().map(|(point, _)| format!("{:?} {}", point.disk, point.system)).collect();
    let mut chart = ChartBuilder::on(area)
        .caption(
            format!("Where the time of a {} read goes, us", size_name(size)),
            ("sans-serif", 15),
        )
        .margin(8)
        .x_label_area_size(26)
        .y_label_area_size(130)
        .build_cartesian_2d(0.0..top, 0.0..bars.len().max(1) as f64)?;
    chart
        .configure_mesh()
        .disable_mesh()
        .x_labels(6)
        .x_label_formatter(&|us| format!("{us:.0}"))
        .y_labels(2 * bars.len() + 1)
        .y_label_formatter(&|at| match at.fract() {
            half if (half - 0.5).abs() < 0.01 => {
                names.get(*at as usize).cloned().unwrap_or_default()
            }
            _ => String::new(),
        })
        .draw()?;
    let kinds = [("disk", RGBColor(60, 110, 190)), ("both", RGBColor(120, 60, 160))];
    let kinds = [kinds[0], kinds[1], ("network", RGBColor(40, 150, 90))];
    for (part, (name, colour)) in kinds.into_iter().enumerate() {
        let boxes = bars.iter().enumerate().map(|(row, (_, stages))| {
            let from: f64 = stages[..part].iter().sum();
            let corners = [(from, row as f64 + 0.2), (from + stages[part], row as f64 + 0.8)];
            Rectangle::new(corners, colour.filled())
        });
        chart
            .draw_series(boxes)?
            .label(name)
            .legend(move |(x, y)| Rectangle::new([(x, y - 4), (x + 10, y + 4)], colour.filled()));
    }
    chart.configure_series_labels().background_style(WHITE.mix(0.8)).border_style(GREY).draw()?;
    Ok(())
}

fn interference(figures: &Figures, area: &Area<'_>) -> Drawn {
    let rows = &figures.interference;
    if rows.is_empty() {
        return Ok(());
    }
    let slowdowns = || rows.iter().map(|row| row.slowdown * 100.0);
    let top = slowdowns().fold(1.0, f64::max) * 1.2;
    let least = slowdowns().fold(0.0, f64::min) * 1.2;
    let mut chart = ChartBuilder::on(area)
        .caption("Slowdown of a memory-bound program, %", ("sans-serif", 15))
        .margin(8)
        .x_label_area_size(26)
        .y_label_area_size(40)
        .build_cartesian_2d(0.0..rows.len() as f64, least..top)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(WHITE)
        .x_labels(2 * rows.len() + 1)
        .x_label_formatter(&|at| match at.fract() {
            half if (half - 0.5).abs() < 0.01 => {
                rows.get(*at as usize).map_or(String::new(), |row| row.system.to_owned())
            }
            _ => String::new(),
        })
        .draw()?;
    chart.draw_series(rows.iter().zip(slowdowns()).enumerate().map(|(at, (row, slowdown))| {
        let corners = [(at as f64 + 0.25, 0.0), (at as f64 + 0.75, slowdown)];
        Rectangle::new(corners, colour(row.system).filled())
    }))?;
    Ok(())
}

//! The options of the driving side.

/// What is measured.
#[derive(Clone, Copy)]
pub enum Form {
    /// Times of all rows, and memory.
    Table,
    /// What an operation costs in exits, faults and calls.
    Counts,
    /// How costs grow.
    Growth,
    /// The seed measurement.
    Seed,
}

/// What to measure and where to put it.
pub struct Options {
    /// Only the rows that belong to the quick form, and fewer repeats.
    pub quick: bool,
    /// Runs of every row on every system.
    pub repeats: usize,
    /// gVisor's program, measured on two of its platforms.
    pub runsc: Option<String>,
    /// bartizan's program; without it the one beside this program.
    pub bartizan: Option<String>,
    /// Options of `bartizan run` to measure with.
    pub run_options: Vec<String>,
    /// Where the figures go as JSON.
    pub json: Option<String>,
    pub form: Form,
    /// Seconds a point of the seed measurement takes.
    pub seconds: Option<u32>,
    /// The rows to measure; none for all.
    pub rows: Vec<String>,
}

const USAGE: &str = "\
bench [OPTIONS] [ROW…]

  --quick          fewer rows, three repeats
  --repeats N      runs of every row on every system [default: 5; quick: 3]
  --runsc PATH     measure gVisor's runsc too, on systrap and ptrace
  --bartizan PATH  the program to measure [default: the one beside this program]
  --option OPTION  an option for `bartizan run` (may be repeated)
  --json FILE      write the figures as JSON
  --counts         count exits, faults and calls of an operation in bartizan, and time nothing
  --growth         costs beside 1, 10, … 10,000 tasks, processes, mappings, files and entries
  --seed           CPU time of enumerating processes beside up to 16,384 threads asleep
  --seconds N      for this long at each point [default: 120; quick: 10]
  --list           name the rows
";

/// Reads the command line; ends the program when it makes no sense.
pub fn parse(args: &[String]) -> Options {
    let mut o = Options {
        quick: false,
        repeats: 0,
        runsc: None,
        bartizan: None,
        run_options: Vec::new(),
        json: None,
        form: Form::Table,
        seconds: None,
        rows: Vec::new(),
    };
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        let mut value = || args.next().cloned().unwrap_or_else(|| refuse(&format!("{arg} needs a value")));
        match arg.as_str() {
            "--quick" => o.quick = true,
            "--counts" => o.form = Form::Counts,
            "--seed" => o.form = Form::Seed,
            "--seconds" => match value().parse() {
                Ok(n) if n > 0 => o.seconds = Some(n),
                _ => refuse("--seconds needs a number above 0"),
            },
            "--growth" => o.form = Form::Growth,
            "--repeats" => match value().parse() {
                Ok(n) if n > 0 => o.repeats = n,
                _ => refuse("--repeats needs a number above 0"),
            },
            "--runsc" => o.runsc = Some(value()),
            "--bartizan" => o.bartizan = Some(value()),
            "--option" => o.run_options.push(value()),
            "--json" => o.json = Some(value()),
            "--list" => {
                super::rows::all().for_each(|r| println!("{:<24} {}", r.name, r.label));
                std::process::exit(0);
            }
            "--help" | "-h" => {
                print!("{USAGE}");
                std::process::exit(0);
            }
            row if super::rows::find(row).is_some() => o.rows.push(row.to_owned()),
            other => refuse(&format!("there is no option or row '{other}'; --list names the rows")),
        }
    }
    if o.repeats == 0 {
        o.repeats = match (o.form, o.quick) {
            (Form::Growth, true) => 1,
            (Form::Growth, false) | (_, true) => 3,
            (_, false) => 5,
        };
    }
    o
}

fn refuse(why: &str) -> ! {
    eprintln!("bench: {why}");
    std::process::exit(2);
}

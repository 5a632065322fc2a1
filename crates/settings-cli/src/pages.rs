//! The manual page and completions of a program.

use clap::{Arg, ArgAction, Command};
use clap_complete::Shell;
use clap_mangen::{
    Man,
    roff::{Roff, bold, roman},
};
use std::fmt::Write;

/// What help and the manual of a program say besides its flags.
#[derive(Debug, Clone, Copy)]
pub struct Pages {
    /// What it is used for: a sentence and a command line each.
    pub examples: &'static [(&'static str, &'static str)],
    /// Exit codes, each with its meaning.
    pub exit_status: &'static [(u8, &'static str)],
    /// Files it reads or writes, each with what for.
    pub files: &'static [(&'static str, &'static str)],
    /// Other pages of the manual.
    pub see_also: &'static [&'static str],
}

impl Pages {
    /// The examples as help shows them.
    #[must_use]
    pub fn examples_text(&self) -> String {
        let mut text = String::from("Examples:\n");
        for (what, line) in self.examples {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "  # {what}\n  {line}");
        }
        text.push('\n');
        text
    }

    /// The manual page.
    #[must_use]
    pub fn manual(&self, command: Command) -> String {
        let name = command.get_name().to_owned();
        // Examples have a section of their own.
        let man = Man::new(command.after_help("").subcommand_help_heading("COMMANDS")).section("8");
        let mut bytes = Vec::new();
        // Writing to memory cannot fail.
        let _ = man.render_title(&mut bytes);
        let _ = man.render_name_section(&mut bytes);
        let _ = man.render_synopsis_section(&mut bytes);
        let _ = man.render_description_section(&mut bytes);
        let _ = man.render_options_section(&mut bytes);
        let _ = man.render_subcommands_section(&mut bytes);
        for section in [self.environment_section(&name), self.own_sections()] {
            let _ = section.to_writer(&mut bytes);
        }
        let _ = man.render_version_section(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Where the variables are reported: beside their flags.
    #[allow(clippy::unused_self, reason = "a section like the others")]
    fn environment_section(&self, name: &str) -> Roff {
        let mut roff = Roff::new();
        roff.control("SH", ["ENVIRONMENT"]);
        roff.text([roman(format!(
            "Flags win over variables, variables over defaults. The variables of a flag stand beside it; {name} --help lists those without a flag."
        ))]);
        roff
    }

    fn own_sections(&self) -> Roff {
        let mut roff = Roff::new();
        roff.control("SH", ["EXIT STATUS"]);
        for (code, meaning) in self.exit_status {
            roff.control("TP", []).text([bold(code.to_string())]).text([roman(*meaning)]);
        }
        roff.control("SH", ["FILES"]);
        for (path, what) in self.files {
            roff.control("TP", []).text([bold(*path)]).text([roman(*what)]);
        }
        roff.control("SH", ["EXAMPLES"]);
        for (what, line) in self.examples {
            roff.control("PP", []).text([roman(format!("{what}:"))]);
            roff.control("RS", ["4"])
                .control("nf", [])
                .text([roman(*line)])
                .control("fi", [])
                .control("RE", []);
        }
        roff.control("SH", ["SEE ALSO"]);
        roff.text([roman(self.see_also.join(", "))]);
        roff
    }
}

/// Completions of a command line for a shell.
#[must_use]
pub fn completions(shell: Shell, mut command: Command, name: &str) -> String {
    let mut bytes = Vec::new();
    if matches!(shell, Shell::Bash | Shell::Fish) {
        // These two offer a value as the next word, where a switch does not take one.
        command = command.mut_args(|arg| if arg.is_require_equals_set() { as_bare_switch(arg) } else { arg });
    }
    clap_complete::generate(shell, &mut command, name, &mut bytes);
    String::from_utf8_lossy(&bytes).into_owned()
}

fn as_bare_switch(arg: Arg) -> Arg {
    let bare = arg.action(ArgAction::SetTrue).num_args(0).value_parser(clap::value_parser!(bool));
    bare.require_equals(false).allow_hyphen_values(false)
}

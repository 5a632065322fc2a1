//! All settings as a table in Markdown.
//!
//! ```console
//! $ cargo run --example settings_table
//! ```

#![allow(clippy::print_stdout)] // what an example is for

use redirect_core::settings::Setting;
fn main() {
    println!("| flag | variable | annotation | default | meaning |");
    println!("|---|---|---|---|---|");
    for setting in Setting::ALL {
        let flag = setting.flag.map(|flag| format!("--{flag}")).unwrap_or_default();
        let cells = [
            flag,
            setting.env.join(", "),
            setting.annotations.join(", "),
            setting.default.to_owned(),
            setting.meaning.to_owned(),
        ];
        // A bar would end the cell.
        println!("| {} |", cells.map(|cell| cell.replace('|', "\\|")).join(" | "));
    }
}

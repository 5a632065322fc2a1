//! Settings that have changed are put into force, or refused.

use agent_runtime::SCOPE;
use reasons::{AgentReason, EventReason};

use super::Agent;
use crate::install::reload::Reload;
use crate::settings::Settings;

impl Agent {
    /// Reads the settings folder, if one is set.
    pub(super) async fn reload(&mut self) {
        let Some(mut reloader) = self.changes.reloader.take() else { return };
        let installer = self.served.parts.installer.clone();
        let read = tokio::task::spawn_blocking(move || {
            let reload = reloader.read(|settings| installer.would_accept(&settings.entry));
            (reloader, reload)
        });
        let reload = match read.await {
            Ok((reloader, reload)) => {
                self.changes.reloader = Some(reloader);
                reload
            }
            Err(error) => {
                log::error!(target: SCOPE, "reading the settings folder panicked; it is not read any more: {error}");
                return;
            }
        };
        match reload {
            Reload::Unchanged => {}
            Reload::Refused(why) => {
                self.served.parts.metrics.settings_refused.set(1);
                self.served.parts.metrics.reloads.get_or_create(&AgentReason::Refused.into()).inc();
                self.warn(
                    EventReason::SettingsRefused,
                    format!(
                        "the settings in the settings folder are invalid; keeping the previous ones: {why}"
                    ),
                );
            }
            Reload::Taken { settings, notices } => {
                if self.served.parts.metrics.settings_refused.set(0) == 1 {
                    log::info!(target: SCOPE, "the settings in the settings folder are valid again");
                }
                for notice in notices {
                    log::warn!(target: SCOPE, "{notice}");
                }
                self.apply(*settings);
            }
        }
    }

    /// Puts settings into force. Those that are not reloaded stay.
    fn apply(&mut self, new: Settings) {
        let old = std::mem::replace(&mut self.settings, new);
        let new = &self.settings;
        let mut changed = Vec::new();
        if old.logging.levels != new.logging.levels {
            if let Some(levels) = &self.changes.levels {
                levels.set_levels(new.logging.levels.clone());
            }
            changed.push("log levels");
        }
        if old.entry != new.entry {
            self.served.parts.installer.set_entry(new.entry.clone());
            // The next pass edits the entry, and no other writer is to blame for that.
            self.memory.settled = None;
            changed.push("the plugin's entry");
        }
        if old.drift != new.drift {
            self.changes.drift.send_replace(new.drift.clone());
            changed.push("the drift watch");
        }
        if changed.is_empty() {
            return;
        }
        self.served.parts.metrics.reloads.get_or_create(&AgentReason::Applied.into()).inc();
        log::info!(target: SCOPE, changed = changed.join(", "); "the settings in the settings folder have changed");
    }
}

//! Any kubeconfig: either access that trusts what the file says and nothing of the machine, or one line that says what is wrong and never
//! shows a secret.

#![no_main]

use cluster_client::kubeconfig::of_text;
use libfuzzer_sys::fuzz_target;
use redirect_core_fuzz::text;
use std::path::Path;

/// What stands for a secret in the seeds and in the dictionary.
const SECRET: &str = "s3cr3tt0k3n";

fuzz_target!(|input: &str| {
    match of_text(input, Path::new("/nonexistent/kubeconfig")) {
        Err(error) => {
            let error = error.to_string();
            text::is_one_safe_line(&error);
            // Names of files are not secrets, and are what must be reported.
            assert!(error.contains("cannot read") || !error.contains(SECRET), "{error}");
        }
        Ok(access) => {
            if let Err(error) = access.check() {
                text::is_one_safe_line(&error.to_string());
                assert!(!error.to_string().contains(SECRET), "{error}");
            }
            text::is_one_safe_line(&access.server());
        }
    }
});

//! The tokens of service accounts: JSON Web Tokens signed with ES256. Pure: whether the account still exists is asked
//! in `account`.

use std::path::Path;

use base64::Engine;
use base64::prelude::BASE64_URL_SAFE_NO_PAD as BASE64;
use ring::digest::{SHA256, digest};
use ring::rand::SystemRandom;
use ring::signature::{
    ECDSA_P256_SHA256_FIXED, ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair as _, UnparsedPublicKey,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::pki::{self, PkiError};

/// Who issues the tokens, and whom they are for unless they say otherwise.
pub const ISSUER: &str = "https://kubernetes.default.svc.cluster.local";
const LONGEST: usize = 16 << 10;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claims {
    pub aud: Vec<String>,
    pub exp: i64,
    pub iat: i64,
    pub iss: String,
    pub jti: String,
    #[serde(rename = "kubernetes.io")]
    pub bound: Bound,
    pub nbf: i64,
    pub sub: String,
}

/// What the token dies with.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bound {
    pub namespace: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<Reference>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<Reference>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret: Option<Reference>,
    pub serviceaccount: Reference,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warnafter: Option<i64>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reference {
    pub name: String,
    pub uid: String,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    #[error("the token is malformed")]
    Malformed,
    #[error("the token was not signed by this server")]
    Signature,
    #[error("the token is of another issuer")]
    Issuer,
    #[error("the token has expired")]
    Expired,
    #[error("the token is not valid yet")]
    Early,
    #[error("the token is not meant for this audience")]
    Audience,
    #[error("{0}")]
    Gone(String),
}

/// The key that signs, and the public half that everybody may know.
pub struct Signer {
    key: EcdsaKeyPair,
    id: String,
    random: SystemRandom,
}

impl Signer {
    /// The key in the directory; made if there is none.
    pub fn open(dir: &Path) -> Result<Self, PkiError> {
        let path = dir.join("sa.key");
        let unusable = |source| PkiError::Unusable { path: path.clone(), source };
        let pair = match pki::read(&path)? {
            Some(pem) => rcgen::KeyPair::from_pem(&pem).map_err(unusable)?,
            None => {
                let made = rcgen::KeyPair::generate().map_err(|source| PkiError::Make { what: "sa", source })?;
                pki::write_private(&path, made.serialize_pem().as_bytes())?;
                made
            }
        };
        let random = SystemRandom::new();
        let key = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &pair.serialize_der(), &random)
            .map_err(|_| unusable(rcgen::Error::CouldNotParseKeyPair))?;
        let id = BASE64.encode(digest(&SHA256, key.public_key().as_ref()));
        Ok(Self { key, id, random })
    }

    pub fn sign(&self, claims: &Claims) -> Option<String> {
        let part = |value: String| BASE64.encode(value);
        let header = part(json!({ "alg": "ES256", "kid": self.id }).to_string());
        let signed = format!("{header}.{}", part(serde_json::to_string(claims).ok()?));
        let signature = self.key.sign(&self.random, signed.as_bytes()).ok()?;
        Some(format!("{signed}.{}", BASE64.encode(signature)))
    }

    /// The claims of a token that is ours, in force at `now`, and meant for one of `audiences`; with those of them it
    /// is meant for.
    pub fn verify(&self, token: &str, audiences: &[String], now: i64) -> Result<(Claims, Vec<String>), TokenError> {
        if token.len() > LONGEST {
            return Err(TokenError::Malformed);
        }
        let (signed, signature) = token.rsplit_once('.').ok_or(TokenError::Malformed)?;
        let (header, payload) = signed.split_once('.').ok_or(TokenError::Malformed)?;
        let decode = |text: &str| BASE64.decode(text).map_err(|_| TokenError::Malformed);
        let header: Value = serde_json::from_slice(&decode(header)?).map_err(|_| TokenError::Malformed)?;
        // The algorithm is ours to choose, not the bearer's.
        if header["alg"] != "ES256" || header["kid"] != self.id.as_str() {
            return Err(TokenError::Signature);
        }
        UnparsedPublicKey::new(&ECDSA_P256_SHA256_FIXED, self.key.public_key())
            .verify(signed.as_bytes(), &decode(signature)?)
            .map_err(|_| TokenError::Signature)?;
        let claims: Claims = serde_json::from_slice(&decode(payload)?).map_err(|_| TokenError::Malformed)?;
        if claims.iss != ISSUER {
            return Err(TokenError::Issuer);
        }
        if claims.exp <= now {
            return Err(TokenError::Expired);
        }
        if claims.nbf > now {
            return Err(TokenError::Early);
        }
        let meant: Vec<String> = audiences.iter().filter(|a| claims.aud.contains(a)).cloned().collect();
        if meant.is_empty() { Err(TokenError::Audience) } else { Ok((claims, meant)) }
    }

    /// The JSON Web Key Set with which others verify our tokens.
    pub fn key_set(&self) -> Value {
        let point = self.key.public_key().as_ref();
        // An uncompressed point: one byte of form, then both coordinates.
        let coordinate = |from: usize| BASE64.encode(point.get(from..from + 32).unwrap_or_default());
        json!({ "keys": [{
            "use": "sig", "kty": "EC", "kid": self.id, "crv": "P-256", "alg": "ES256",
            "x": coordinate(1), "y": coordinate(33),
        }] })
    }
}

pub fn configuration() -> Value {
    json!({
        "issuer": ISSUER, "jwks_uri": format!("{ISSUER}/openid/v1/jwks"), "response_types_supported": ["id_token"],
        "subject_types_supported": ["public"], "id_token_signing_alg_values_supported": ["ES256"],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claims() -> Claims {
        let serviceaccount = Reference { name: "s".into(), uid: "u".into() };
        Claims {
            aud: vec![ISSUER.into(), "other".into()],
            exp: 200,
            iat: 100,
            iss: ISSUER.into(),
            jti: "j".into(),
            bound: Bound { namespace: "n".into(), serviceaccount, ..Bound::default() },
            nbf: 100,
            sub: "system:serviceaccount:n:s".into(),
        }
    }

    #[test]
    fn a_token_counts_only_in_its_time_and_for_its_audience() {
        let dir = tempfile::tempdir().unwrap();
        let signer = Signer::open(dir.path()).unwrap();
        let token = signer.sign(&claims()).unwrap();
        for (case, audience, now, want) in [
            ("in its time", ISSUER, 150, None),
            ("for its other audience", "other", 150, None),
            ("too early", ISSUER, 99, Some(TokenError::Early)),
            ("at its end", ISSUER, 200, Some(TokenError::Expired)),
            ("for somebody else", "stranger", 150, Some(TokenError::Audience)),
        ] {
            assert_eq!(signer.verify(&token, &[audience.into()], now).err(), want, "{case}");
        }
        let again = Signer::open(dir.path()).unwrap();
        assert_eq!(again.verify(&token, &[ISSUER.into()], 150).unwrap().0, claims(), "the key outlives a restart");
    }

    #[test]
    fn a_forged_token_is_refused() {
        let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let [ours, theirs] = dirs.each_ref().map(|d| Signer::open(d.path()).unwrap());
        let token = ours.sign(&claims()).unwrap();
        let parts: Vec<&str> = token.split('.').collect();
        let forged = BASE64.encode(serde_json::to_string(&Claims { exp: 900, ..claims() }).unwrap());
        let none = BASE64.encode(r#"{"alg":"none"}"#);
        for (case, token, want) in [
            ("claims changed", format!("{}.{forged}.{}", parts[0], parts[2]), TokenError::Signature),
            ("no algorithm", format!("{none}.{}.", parts[1]), TokenError::Signature),
            ("signed by another", theirs.sign(&claims()).unwrap(), TokenError::Signature),
            ("no signature", format!("{}.{}", parts[0], parts[1]), TokenError::Malformed),
            ("not a token", "nonsense".into(), TokenError::Malformed),
            ("endless", "x.".repeat(LONGEST), TokenError::Malformed),
        ] {
            assert_eq!(ours.verify(&token, &[ISSUER.into()], 150).err(), Some(want), "{case}");
        }
    }
}
